"""What the log says of workers that a run loses."""

from __future__ import annotations

import pytest

from sf_core.scheduling.cluster import Losses
from sf_core.scheduling.plan import Plan, Worker

TAGS = {"r0": "rollout", "t0": "rollout train", "a0": "agent", "a1": "agent", "c0": "cpu"}
PLAN = Plan(rollout=("r0",), trainers=("t0",), lent=True, agent=("a0", "a1"))


def connected(*, without: str = "", restarted: str = "") -> dict[str, Worker]:
    """The workers by address. Another process has another address."""
    return {
        f"tcp://{name}{'-2' if name == restarted else ''}": Worker(name, frozenset(tags.split()))
        for name, tags in TAGS.items()
        if name != without
    }


@pytest.fixture
def losses() -> Losses:
    losses = Losses()
    assert losses.describe_losses(connected(), PLAN, leased=TAGS) == []
    return losses


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("r0", "worker r0 is lost: its answers continue on t0"),
        ("a0", "worker a0 is lost: its sessions start again on a1"),
        ("c0", "worker c0 is lost: its stage starts again when c0 is back or is replaced"),
        (
            "t0",
            "worker t0 is lost: training continues from the last committed weights when t0 is back or is "
            "replaced",
        ),
    ],
)
def test_a_lost_worker_is_named_once_with_the_place_where_the_run_continues(
    losses: Losses, name: str, sentence: str
) -> None:
    assert losses.describe_losses(connected(without=name), PLAN, leased=TAGS) == [sentence]
    assert losses.describe_losses(connected(without=name), PLAN, leased=TAGS) == []
    assert losses.describe_losses(connected(restarted=name), PLAN, leased=TAGS) == [f"worker {name} is back"]
    assert losses.describe_losses(connected(restarted=name), PLAN, leased=TAGS) == []


def test_a_worker_that_restarts_between_two_looks_is_named(losses: Losses) -> None:
    sentences = losses.describe_losses(connected(restarted="r0"), PLAN, leased=TAGS)
    assert sentences == ["worker r0 was lost and is back: its answers continue there"]


def test_a_runner_that_has_given_back_its_lease_is_not_missed(losses: Losses) -> None:
    assert losses.describe_losses(connected(without="a1"), PLAN, leased={"r0", "a0"}) == []


def test_nobody_is_lost_while_the_scheduler_does_not_answer(losses: Losses) -> None:
    assert losses.describe_losses({}, PLAN, leased=TAGS) == []
    assert losses.describe_losses(connected(), PLAN, leased=TAGS) == []
