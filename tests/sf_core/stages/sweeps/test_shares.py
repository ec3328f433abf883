from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from sf_core.config import RunConfig, WorkerConfig
from sf_core.scheduling.plan import Worker, make_plan
from sf_core.stages.sweeps.sweep import copy_workers, describe_shares, divide

TAGS = {"r": "rollout", "t": "rollout train", "a": "agent", "c": "cpu"}


def cluster(**counts: int) -> list[Worker]:
    return [
        Worker(f"{kind}{number}", frozenset(TAGS[kind].split()))
        for kind, count in counts.items()
        for number in range(count)
    ]


def here(device: str, names: str = "r0 t0 a0 c0") -> Mapping[str, WorkerConfig]:
    return {
        name: WorkerConfig(
            tags=tuple(TAGS[name[0]].split()),
            device=f"{device}:{at}" if device == "cuda" and name[0] in "rt" else "cpu",
        )
        for at, name in enumerate(names.split())
    }


@given(
    st.fixed_dictionaries({kind: st.integers(0, 6) for kind in TAGS}),
    st.sampled_from([None, 1, 2, 3]),
    st.integers(1, 3),
)
def test_shares_are_equal_apart_and_enough_for_a_run(
    counts: dict[str, int], most: int | None, trainers: int
) -> None:
    workers = cluster(**counts)
    config = RunConfig.model_validate({"train": {"workers": trainers}})
    shares = divide(workers, [config], most)
    names = [name for share in shares for name in share]
    assert len(names) == len(set(names)) and set(names) <= {worker.name for worker in workers}
    assert len(shares) <= (most or len(workers) or 1)
    if len(shares) == 1:
        assert set(names) == {worker.name for worker in workers}
        return
    tags = {worker.name: worker.tags for worker in workers}
    kinds = {tuple(sorted(" ".join(sorted(tags[name])) for name in share)) for share in shares}
    assert len(kinds) == 1
    for share in shares:
        make_plan([Worker(name, tags[name]) for name in share], config)


def test_as_many_runs_at_once_as_there_are_workers_for() -> None:
    workers = cluster(r=2, t=2, a=2, c=3)
    shares = divide(workers, [RunConfig()])
    assert shares == [("a0", "c0", "r0", "t0"), ("a1", "c1", "r1", "t1")]
    assert describe_shares(shares) == "2 runs at a time, on a0, c0, r0, t0; a1, c1, r1, t1"
    assert describe_shares(divide(workers, [RunConfig()], 1)).startswith("one run at a time, on a0, a1, c0")
    # the setting that needs most decides for all
    both = [RunConfig(), RunConfig.model_validate({"train": {"workers": 2}})]
    assert len(divide(workers, both)) == 1


def test_this_machine_starts_workers_for_as_many_runs_as_its_gpus_suffice_for() -> None:
    gpu = here("cuda")
    copied = copy_workers(gpu, 5, None, may_move=True)
    assert {name: worker.device for name, worker in copied.items() if name[0] in "rt"} == {
        "r0-0": "cuda:0",
        "t0-0": "cuda:1",
        "r0-1": "cuda:2",
        "t0-1": "cuda:3",
    }
    assert copy_workers(gpu, 5, 1, may_move=True) == gpu
    assert copy_workers(gpu, 5, None, may_move=False) == gpu
    cpu = here("cpu")
    assert copy_workers(cpu, 0, None, may_move=True) == cpu
    assert len(copy_workers(cpu, 0, 2, may_move=True)) == 2 * len(cpu)
