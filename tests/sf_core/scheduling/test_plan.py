from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sf_core.config import RunConfig
from sf_core.config.devices import DEVICES
from sf_core.config.pipelines import PIPELINES
from sf_core.scheduling.plan import Plan, Worker, duty_of, local_workers, make_plan, worker_of
from tests.bench.refusals import clear_refusal


def workers(**tags: str) -> list[Worker]:
    return [Worker(name, frozenset(text.split())) for name, text in tags.items()]


def test_the_quickstart_cluster_lends_its_trainer() -> None:
    plan = make_plan(workers(r0="rollout", t0="rollout train", a0="agent", c0="cpu"), RunConfig())
    assert (plan.rollout, plan.trainers, plan.lent, plan.agent) == (("r0",), ("t0",), True, ("a0",))


@pytest.mark.parametrize(
    ("hosts", "settings", "is_lent"),
    [
        pytest.param({"t0": "a", "r0": "a"}, {}, False, id="one host"),
        pytest.param({"t0": "a", "r0": "b"}, {}, True, id="two hosts"),
        pytest.param({"t0": "a"}, {}, True, id="the other has a device of its own"),
        pytest.param({}, {}, True, id="both have one"),
        pytest.param({"t0": "a", "r0": "a"}, {"pipeline": "multiplexed"}, True, id="by the user's choice"),
        pytest.param({"t0": "a", "r0": "a"}, {"engine": {"kind": "emulated"}}, True, id="nothing computes"),
    ],
)
def test_a_trainer_whose_cores_sample_already_is_not_lent(
    hosts: dict[str, str], settings: dict[str, Any], is_lent: bool
) -> None:
    found = [
        replace(worker, shared_host=hosts.get(worker.name))
        for worker in workers(r0="rollout", t0="rollout train", a0="agent", c0="cpu")
    ]
    plan = make_plan(found, RunConfig.model_validate(settings))
    assert (plan.rollout, plan.trainers, plan.lent) == (("r0",), ("t0",), is_lent)
    # it is lent where nobody else samples
    alone = make_plan([worker for worker in found if worker.name != "r0"], RunConfig())
    assert (alone.rollout, alone.trainers, alone.lent) == ((), ("t0",), True)


def test_a_pure_trainer_is_preferred_and_never_lent() -> None:
    plan = make_plan(workers(t0="rollout train", t1="train", a0="agent", c0="cpu"), RunConfig())
    assert (plan.rollout, plan.trainers, plan.lent) == (("t0",), ("t1",), False)


def test_a_run_whose_agents_are_all_outside_needs_no_worker_for_them() -> None:
    without = workers(r0="rollout", t0="rollout train", c0="cpu")
    config = RunConfig.model_validate({"rollout": {"groups_per_batch": 4, "outside_groups": 4}})
    assert make_plan(without, config).agent == ()


SERVED = RunConfig.model_validate({"environment": {"judges": {"quality": {"model": "/judge"}}}})


@pytest.mark.parametrize("tags", ["", "agent reward", "reward train rollout"])
def test_a_judge_to_serve_needs_a_worker_that_does_nothing_but_score(tags: str) -> None:
    without = workers(t0="rollout train", a0="agent", c0="cpu")
    others = [Worker("x", frozenset(tags.split()))] if tags else []
    with clear_refusal("environment.judges.quality.model needs a worker tagged reward"):
        make_plan([*without, *others], SERVED)
    assert make_plan([*without, *workers(s0="reward")], SERVED).reward == ("s0",)
    at_url = {"environment": {"judges": {"quality": {"url": "http://127.0.0.1:1/v1"}}}}
    assert make_plan(without, RunConfig.model_validate(at_url)).reward == ()


def test_a_gpu_that_is_left_goes_to_the_worker_that_serves_a_judge() -> None:
    cluster = {"workers": RunConfig().cluster.model_dump()["workers"] | {"s0": {"tags": ["reward"]}}}
    for config, device in ((SERVED, "cuda:2"), (RunConfig(), "cpu")):
        found = local_workers(RunConfig.model_validate(config.model_dump() | {"cluster": cluster}), 3)
        assert {name: found[name].device for name in ("t0", "r0", "s0")} == {
            "t0": "cuda:0",
            "r0": "cuda:1",
            "s0": device,
        }


@pytest.mark.parametrize(
    ("tags", "duty"),
    [
        ("rollout", "rollout"),
        ("rollout train", "rollout"),
        ("agent", "agent"),
        ("reward", "reward"),
        ("agent reward", "agent"),
        ("train", None),
        ("cpu", None),
    ],
)
def test_a_worker_is_held_for_one_thing_whenever_it_joins(tags: str, duty: str | None) -> None:
    [worker] = workers(x=tags)
    assert duty_of(worker, trainers=("t0",)) == duty
    assert duty_of(worker, trainers=("x",)) is None


def test_a_worker_is_known_by_its_private_resource() -> None:
    assert worker_of({"resources": {"rollout": 1, "@r7": 1}}) == Worker("r7", frozenset({"rollout"}))
    with pytest.raises(ValueError, match="exactly one resource @NAME"):
        worker_of({"resources": {"rollout": 1}})


def run(pipeline: str | None = None, *, ranks: int = 1, **sections: Any) -> RunConfig:
    return RunConfig.model_validate({"pipeline": pipeline, "train": {"workers": ranks}, **sections})


OTHERS = {"a0": "agent", "c0": "cpu"}


@pytest.mark.parametrize(
    ("pipeline", "ranks", "tags", "rollout", "trainers", "lent", "overlap"),
    [
        ("colocated", 2, {"d0": "rollout train", "d1": "rollout train"}, (), ("d0", "d1"), True, False),
        ("disaggregated", 1, {"r0": "rollout", "t0": "train"}, ("r0",), ("t0",), False, False),
        # a trainer that could roll out is left alone
        ("disaggregated", 1, {"r0": "rollout", "t0": "rollout train"}, ("r0",), ("t0",), False, False),
        ("async", 1, {"r0": "rollout", "t0": "train"}, ("r0",), ("t0",), False, True),
        ("multiplexed", 1, {"r0": "rollout", "t0": "rollout train"}, ("r0",), ("t0",), True, True),
        # a pure trainer cannot be lent
        (
            "multiplexed",
            1,
            {"r0": "rollout", "t0": "train", "t1": "rollout train"},
            ("r0",),
            ("t1",),
            True,
            True,
        ),
        (None, 1, {"d0": "rollout train"}, (), ("d0",), True, True),
        (
            None,
            2,
            {"r0": "rollout", "t0": "rollout train", "t1": "train"},
            ("r0",),
            ("t1", "t0"),
            False,
            True,
        ),
    ],
)
def test_a_pipeline_gives_workers_their_duties_by_their_tags(
    pipeline: str | None,
    ranks: int,
    tags: dict[str, str],
    rollout: tuple[str, ...],
    trainers: tuple[str, ...],
    lent: bool,
    overlap: bool,
) -> None:
    config = run(pipeline, ranks=ranks)
    plan = make_plan(workers(**tags, **OTHERS), config)
    assert (plan.rollout, plan.trainers, plan.lent) == (rollout, trainers, lent)
    assert config.overlap is overlap
    assert config.lag_bound == (config.rollout.max_lag if overlap else 0)


@pytest.mark.parametrize(
    ("pipeline", "train", "tags", "trainers"),
    [
        # lost for good, and another one is there
        (None, {}, {"r0": "rollout", "t1": "rollout train"}, ("t1",)),
        # one of two is left, and may go on alone
        (None, {"workers": 2, "min_workers": 1}, {"r0": "rollout", "t0": "rollout train"}, ("t0",)),
        # as many as hold whole policies together
        (
            None,
            {"workers": 4, "min_workers": 2, "backend": "megatron", "tensor_parallel": 2},
            {"r0": "rollout", "t0": "train", "t1": "train", "t2": "train"},
            ("t0", "t1"),
        ),
        # the second one is back, under whatever name
        (
            None,
            {"workers": 2, "min_workers": 1},
            {"r0": "rollout", "t0": "rollout train", "x": "train"},
            ("x", "t0"),
        ),
        # nobody is left who only rolls out
        ("multiplexed", {}, {"t0": "rollout train"}, ("t0",)),
        # what joins a colocated run rolls out
        ("colocated", {}, {"t0": "rollout train", "t1": "rollout train", "r0": "rollout"}, ("t0",)),
        # agents go on
        (None, {}, {"t0": "rollout train", "t1": "agent train"}, ("t0",)),
    ],
)
def test_a_run_that_is_on_goes_on_with_the_workers_that_are_there(
    pipeline: str | None, train: dict[str, Any], tags: dict[str, str], trainers: tuple[str, ...]
) -> None:
    config = RunConfig.model_validate({"pipeline": pipeline, "train": train})
    plan = make_plan(workers(**tags, **OTHERS), config, trained=("t0",))
    assert plan.trainers == trainers


def test_who_runs_agents_trains_only_if_that_is_what_it_did() -> None:
    found = workers(t0="agent train", r0="rollout", **OTHERS)
    assert make_plan(found, RunConfig(), trained=("t0",)).trainers == ("t0",)
    with pytest.raises(
        ValueError, match="no worker is left to train, because t0 must run agents or score answers; "
    ):
        make_plan(found, RunConfig(), trained=("t1",))


def test_two_workers_of_one_name_are_refused() -> None:
    twice = workers(t0="rollout train", **OTHERS) + workers(t0="rollout")
    with pytest.raises(ValueError, match="two workers are named 't0'; a task names its worker"):
        make_plan(twice, RunConfig())


def test_tags_that_the_user_prefers_decide_before_the_device() -> None:
    both = frozenset({"rollout", "train"})
    found = [
        Worker("d0", both | {"h20"}, DEVICES["h20"]),
        Worker("d1", both | {"h100"}, DEVICES["h100"]),
        *workers(**OTHERS),
    ]
    for prefer, trainer in (
        ({}, "d1"),
        ({"train": ["h20"]}, "d0"),
        ({"rollout": ["h100"]}, "d0"),
        ({"train": ["h20"], "rollout": ["h20"]}, "d1"),
        ({"train": ["nobody-has-it"]}, "d1"),
    ):
        assert make_plan(found, run(cluster={"prefer": prefer})).trainers == (trainer,)


tag_sets = st.frozensets(st.sampled_from(["rollout", "train", "agent", "cpu", "h20", "spot"]), min_size=1)
devices = st.none() | st.sampled_from(list(DEVICES.values()))
clusters = st.dictionaries(st.sampled_from("pqrstuvw"), st.tuples(tag_sets, devices), max_size=8).map(
    lambda found: [Worker(name, tags, device) for name, (tags, device) in found.items()]
)
runs = st.builds(
    run,
    st.sampled_from(list(PIPELINES)),
    ranks=st.integers(1, 3),
    cluster=st.sampled_from([{}, {"prefer": {"train": ["h20"]}}, {"prefer": {"rollout": ["h20", "spot"]}}]),
)


def outcome(found: list[Worker], config: RunConfig) -> Plan | str:
    try:
        return make_plan(found, config)
    except ValueError as error:
        assert "\n" not in str(error)
        return "refused"


@given(clusters, runs, st.randoms())
def test_a_plan_does_not_depend_on_the_order_in_which_workers_are_found(
    found: list[Worker], config: RunConfig, random: Random
) -> None:
    shuffled = list(found)
    random.shuffle(shuffled)
    assert outcome(shuffled, config) == outcome(found, config)


@given(clusters, runs)
def test_on_an_unchanged_cluster_the_plan_stays(found: list[Worker], config: RunConfig) -> None:
    plan = outcome([*found, *workers(**OTHERS)], config)
    if not isinstance(plan, str):
        assert make_plan([*found, *workers(**OTHERS)], config, trained=plan.trainers) == plan


@given(clusters, runs)
def test_duties_are_given_only_to_workers_that_carry_their_tags(
    found: list[Worker], config: RunConfig
) -> None:
    # the two that every run needs
    plan = outcome([*found, *workers(**OTHERS)], config)
    if isinstance(plan, str):
        return
    tags = {worker.name: worker.tags for worker in [*found, *workers(**OTHERS)]}
    assert len(plan.trainers) == config.train.workers
    assert all("train" in tags[name] for name in plan.trainers)
    assert all("rollout" in tags[name] for name in (*plan.rollout, *(plan.trainers if plan.lent else ())))
    assert all("agent" in tags[name] for name in plan.agent)
    assert not set(plan.rollout) & set(plan.trainers)
    # somebody rolls out
    assert plan.rollout or plan.lent


DUAL = {"tags": ["rollout", "train"]}
ROLLS = {"tags": ["rollout"]}
AGENT = {"tags": ["agent"]}


@pytest.mark.parametrize(
    ("num_gpus", "settings", "devices"),
    [
        (0, {}, {"r0": "cpu", "t0": "cpu", "a0": "cpu", "c0": "cpu"}),
        (1, {}, {"t0": "cuda:0", "a0": "cpu", "c0": "cpu"}),
        (1, {"pipeline": "colocated"}, {"t0": "cuda:0", "a0": "cpu", "c0": "cpu"}),
        # it needs a worker beside the trainer
        (1, {"pipeline": "async"}, {"r0": "cpu", "t0": "cuda:0", "a0": "cpu", "c0": "cpu"}),
        (2, {}, {"r0": "cuda:1", "t0": "cuda:0", "a0": "cpu", "c0": "cpu"}),
        (8, {}, {"r0": "cuda:1", "t0": "cuda:0", "a0": "cpu", "c0": "cpu"}),
        (
            1,
            {"cluster": {"workers": {"x": ROLLS, "y": DUAL, "z": AGENT}}},
            {"x": "cpu", "y": "cuda:0", "z": "cpu"},
        ),
        (
            2,
            {"cluster": {"workers": {"x": ROLLS | {"device": "cuda:0"}, "y": DUAL, "z": ROLLS}}},
            {"x": "cuda:0", "y": "cuda:1", "z": "cpu"},
        ),
        (1, {"cluster": {"workers": {"x": DUAL | {"device": "cpu"}}}}, {"x": "cpu"}),
    ],
)
def test_workers_that_compute_get_the_gpus_there_are_trainers_first(
    num_gpus: int, settings: dict[str, Any], devices: dict[str, str]
) -> None:
    config = RunConfig.model_validate(settings)
    found = local_workers(config, num_gpus)
    assert {name: worker.device for name, worker in found.items()} == devices
    # what is stored is as it was, so the run resumes on other hardware
    assert all(worker.device is None for worker in RunConfig().cluster.workers.values())


@pytest.mark.parametrize("num_gpus", [0, 1, 2, 9])
@pytest.mark.parametrize("pipeline", [None, "async", "multiplexed", "disaggregated"])
def test_the_default_workers_of_any_machine_can_run_any_pipeline(num_gpus: int, pipeline: str | None) -> None:
    config = RunConfig.model_validate({"pipeline": pipeline})
    workers = [Worker(name, frozenset(w.tags)) for name, w in local_workers(config, num_gpus).items()]
    assert make_plan(workers, config).trainers == ("t0",)


@pytest.mark.parametrize("num_gpus", [0, 1, 2])
def test_without_room_for_two_workers_a_cpu_has_one(num_gpus: int) -> None:
    config = RunConfig()
    assert ("r0" in local_workers(config, num_gpus, has_room=False)) == (num_gpus == 2)
    assert "r0" in local_workers(config, 0)
    own = {name: worker.model_dump() for name, worker in config.cluster.workers.items()}
    own["r0"]["threads"] = 1
    of_the_user = RunConfig.model_validate({"cluster": {"workers": own}})
    assert "r0" in local_workers(of_the_user, num_gpus, has_room=False)
    needs_both = RunConfig.model_validate({"pipeline": "async"})
    assert "r0" in local_workers(needs_both, num_gpus, has_room=False)


ADAPTER_IN_VLLM: dict[str, Any] = {"engine": {"kind": "vllm"}, "train": {"lora": {}}}


def test_trainers_of_an_adapter_are_not_lent_to_vllm() -> None:
    """Though their tags would allow it."""
    found = [Worker("r0", frozenset({"rollout"})), Worker("t0", frozenset({"rollout", "train"}))]
    found += [Worker("a0", frozenset({"agent"})), Worker("c0", frozenset({"cpu"}))]
    for settings, lent in (
        (ADAPTER_IN_VLLM, False),
        ({"engine": {"kind": "vllm"}}, True),
        ({"train": {"lora": {}}}, True),
    ):
        plan = make_plan(found, RunConfig.model_validate(settings))
        assert (plan.trainers, plan.rollout, plan.lent) == (("t0",), ("r0",), lent)


def test_a_single_gpu_samples_an_adapter_with_the_built_in_engine() -> None:
    config = RunConfig.model_validate(ADAPTER_IN_VLLM)
    with clear_refusal(
        "engine.kind vllm with train.lora needs two GPUs, but this machine has one GPU",
        "leave engine.kind out, so that the built-in engine samples and trains on the same GPU",
    ):
        local_workers(config, 1)
    for num_gpus in (0, 2):
        assert {"r0", "t0"} <= local_workers(config, num_gpus).keys()
    assert local_workers(RunConfig.model_validate({"train": {"lora": {}}}), 1)["t0"].device == "cuda:0"
