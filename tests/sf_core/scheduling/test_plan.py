import pytest

from sf_core.config import RunConfig
from sf_core.scheduling.plan import Worker, make_plan, worker_of


def workers(**tags: str) -> list[Worker]:
    return [Worker(name, frozenset(text.split())) for name, text in tags.items()]


def test_the_quickstart_cluster_lends_its_trainer() -> None:
    plan = make_plan(workers(r0="rollout", t0="rollout train", a0="agent", c0="cpu"), RunConfig())
    assert (plan.rollout, plan.trainers, plan.lent, plan.agent) == (("r0",), ("t0",), True, ("a0",))


def test_a_pure_trainer_is_preferred_and_never_lent() -> None:
    plan = make_plan(workers(t0="rollout train", t1="train", a0="agent", c0="cpu"), RunConfig())
    assert (plan.rollout, plan.trainers, plan.lent) == (("t0",), ("t1",), False)


def test_a_missing_tag_is_named_with_what_the_workers_offer() -> None:
    with pytest.raises(
        ValueError, match=r"no worker carries 'train'; workers: r0 \{rollout\}, x \{agent\}, c0 \{cpu\}"
    ):
        make_plan(workers(r0="rollout", x="agent", c0="cpu"), RunConfig())


def test_agent_and_cpu_on_one_worker_are_refused() -> None:
    with pytest.raises(ValueError, match="carries both `agent` and `cpu`"):
        make_plan(workers(t0="rollout train", x="agent cpu"), RunConfig())


def test_a_worker_is_known_by_its_private_resource() -> None:
    assert worker_of({"rollout": 1, "@r7": 1}) == Worker("r7", frozenset({"rollout"}))
    with pytest.raises(ValueError, match="exactly one private resource"):
        worker_of({"rollout": 1})
