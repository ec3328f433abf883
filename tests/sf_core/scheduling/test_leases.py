from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sf_core.config import RunConfig
from sf_core.scheduling.leases import (
    AGAIN_S,
    Action,
    Lease,
    LeaseEnd,
    LeaseSet,
    Revoke,
    lease_of,
)
from sf_core.scheduling.plan import Worker, make_plan

AGENTS = ("a0", "a1", "a2")
TAGS = {"r0": "rollout", "t0": "rollout train", "t1": "rollout train", "c0": "cpu"}
TAGS |= dict.fromkeys(AGENTS, "agent")
WORKERS = {name: Worker(name, frozenset(tags.split())) for name, tags in TAGS.items()}
SETTINGS: dict[str, Any] = {
    "train": {"iterations": 4, "gang_timeout_s": 20},
}
LOST = LeaseEnd("lost", ConnectionError("no claim was answered\nfor long"))


class Bench:
    """A LeaseSet with its facts: the time, who is connected and how leases have ended."""

    def __init__(self, *workers: str, **changes: Any) -> None:
        config = RunConfig.model_validate(SETTINGS | changes)
        self.connected = set(workers or WORKERS.keys() - {"a1", "a2"})
        self.leases = LeaseSet(make_plan(self.workers(), config), config, attempt=1)
        self.now = 1000.0
        self.ended: dict[str, LeaseEnd] = {}
        self.given: dict[str, Lease] = {}

    def workers(self) -> list[Worker]:
        return [WORKERS[name] for name in sorted(self.connected)]

    def observe(self) -> None:
        ended = {lease_id: self.ended.get(lease_id) for lease_id in self.leases.list_unsettled()}
        self.leases.observe(self.now, self.workers(), ended)

    def noted(self, actions: list[Action]) -> list[Action]:
        self.given |= {action.lease_id: action for action in actions if isinstance(action, Lease)}
        return actions

    def begin(self) -> list[Action]:
        self.observe()
        return self.noted(self.leases.begin())

    def replan(self) -> list[Action]:
        self.observe()
        return self.noted(self.leases.replan())

    def lend(self, iteration: int) -> list[Action]:
        self.observe()
        return self.noted(self.leases.lend(iteration))

    def adapt(self) -> list[Action]:
        self.observe()
        return self.noted(self.leases.adapt())

    def end(self, worker: str, how: LeaseEnd) -> None:
        """End the oldest lease of this worker that goes on."""
        open_ = [x for x in self.given.values() if x.worker == worker and x.lease_id not in self.ended]
        self.ended[open_[0].lease_id] = how


def given(actions: Iterable[Action]) -> list[tuple[str, int | None]]:
    """Worker and `after` of the submitted leases."""
    return [(action.worker, action.after) for action in actions if isinstance(action, Lease)]


BROKEN = ValueError("module my_agent has no agent")
FAILED = LeaseEnd("failed", BROKEN)


def test_all_but_trainers_are_held_from_the_start() -> None:
    bench = Bench()
    assert given(bench.begin()) == [("a0", None), ("r0", None), ("t1", None)]
    assert [(x.duty, x.holder) for x in bench.given.values()] == [
        ("agent", "a0:a0-0.1"),
        ("rollout", "r0:r0-1.1"),
        ("rollout", "t1:t1-2.1"),
    ]
    assert lease_of("r0:r0-1.1") == ("r0", "r0-1.1")


def test_a_trainer_has_one_loan_and_the_next_one_queued_behind_it_but_for_the_last_iteration() -> None:
    bench = Bench()
    assert given(bench.lend(0)) == [("t0", None), ("t0", 0)]
    for iteration in range(1, 4):
        assert bench.leases.to_revoke(iteration - 1) == [("t0", f"t0-{iteration - 1}.1")]
        bench.end("t0", LeaseEnd("revoked"))
        assert given(bench.lend(iteration)) == [("t0", iteration)]
    # after the last iteration there is only an evaluation
    bench.end("t0", LeaseEnd("revoked"))
    assert bench.lend(4) == []
    assert {lease.trainers for lease in bench.given.values()} == {("t0",)}


def test_a_trainer_that_the_gate_refused_is_lent_again_in_the_next_iteration() -> None:
    bench = Bench()
    bench.lend(2)
    for _ in range(2):
        bench.end("t0", LeaseEnd("returned"))
    assert given(bench.lend(3)) == [("t0", 2), ("t0", 3)]


def test_trainers_without_the_tag_are_not_lent() -> None:
    assert Bench(pipeline="async").lend(0) == []


def test_a_worker_whose_lease_was_lost_is_held_again_but_not_all_the_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench()
    bench.begin()
    bench.end("r0", LOST)
    bench.now += AGAIN_S
    assert bench.adapt() == []
    bench.now += 0.1
    assert given(bench.adapt()) == [("r0", None)]
    lost = "lease r0-1.1 was lost (ConnectionError: no claim was answered); worker r0 gets a new lease"
    assert lost in caplog.messages
    bench.end("r0", LOST)
    assert bench.adapt() == []


def test_a_trainer_whose_loan_was_lost_is_lent_again_once_it_is_there() -> None:
    bench = Bench()
    bench.lend(1)
    bench.end("t0", LOST)
    bench.connected = {"t0", "r0"}
    assert given(bench.adapt()) == [("r0", None)]
    bench.now += AGAIN_S + 1
    bench.connected = {"r0"}
    assert bench.adapt() == []
    bench.connected = {"t0", "r0"}
    assert given(bench.adapt()) == [("t0", 0)]
    assert bench.adapt() == []


def test_a_lease_of_which_no_end_is_known_is_not_given_again() -> None:
    bench = Bench("r0", "t0", "a0", "c0")
    bench.begin()
    bench.end("a0", LeaseEnd("unknown"))
    bench.now += AGAIN_S + 1
    assert bench.adapt() == []
    assert "a0-0.1" in bench.leases.list_unsettled()
    bench.ended["a0-0.1"] = LOST
    assert given(bench.adapt()) == [("a0", None)]


def test_workers_that_join_are_held(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    bench = Bench("r0", "t0", "a0", "c0")
    bench.begin()
    assert bench.adapt() == []
    bench.connected |= {"a1", "t1"}
    assert given(bench.adapt()) == [("a1", None), ("t1", None)]
    assert caplog.messages == ["worker a1 joins the run", "worker t1 joins the run"]
    assert bench.adapt() == []


def test_a_lease_that_was_lost_does_not_end_the_run_and_one_that_failed_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench()
    bench.lend(0)
    bench.end("t0", LOST)
    assert bench.lend(0) == []
    assert "lease t0-0.1 was lost (ConnectionError: no claim was answered)" in caplog.messages
    bench.end("t0", FAILED)
    with pytest.raises(ValueError, match="module my_agent has no agent"):
        bench.lend(1)


def test_a_failed_lease_ends_the_run_at_its_end_unless_its_worker_is_gone_or_the_flow_failed_itself() -> None:
    bench = Bench()
    bench.begin()
    bench.end("r0", FAILED)
    bench.adapt()
    bench.leases.end()
    bench.leases.check_end(flow_failed=True)
    with pytest.raises(ValueError, match="module my_agent has no agent"):
        bench.leases.check_end(flow_failed=False)
    bench.connected.remove("r0")
    bench.observe()
    bench.leases.check_end(flow_failed=False)


def test_a_failed_lease_is_said_at_once_and_the_run_ends_when_nobody_is_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench("r0", "t0", "t1", "a0", "a1", "c0")
    bench.begin()
    bench.adapt()
    bench.end("a0", FAILED)
    for _ in range(2):
        bench.adapt()
    said = [message for message in caplog.messages if "failed" in message]
    assert said == ["lease a0-0.1 failed: ValueError: module my_agent has no agent"]
    # one that was lost gets another lease
    bench.end("r0", LOST)
    bench.end("t1", LOST)
    bench.adapt()
    assert bench.leases.nobody_left is None
    bench.end("a1", LeaseEnd("failed", ValueError("another")))
    bench.adapt()
    assert bench.leases.nobody_left is BROKEN
    assert "no worker is left for `agent`, so the run ends" in caplog.messages
    bench.now += AGAIN_S + 1
    assert bench.adapt() == []
    with pytest.raises(ValueError, match="module my_agent has no agent"):
        bench.leases.check_end(flow_failed=True)


def test_leases_follow_who_trains(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.begin()
    bench.lend(0)
    bench.connected.remove("t0")
    bench.now += 20
    # a worker that is away may be restarting
    assert bench.replan() == []
    assert bench.leases.plan.trainers == ("t0",)
    bench.now += 0.1
    assert bench.replan() == [Revoke("t0-3.1"), Revoke("t0-4.1")]
    assert "the trainers change to: t1" in caplog.messages
    assert given(bench.lend(1)) == [("t1", 1)]
    # the lease that it had as no trainer ends like a loan
    assert ("t1", "t1-2.1") in bench.leases.to_revoke(1)
    bench.connected.add("t0")
    assert given(bench.adapt()) == [("t0", None)]


def test_a_device_that_was_taken_to_replace_a_lost_trainer_is_held_again_and_a_drained_one_is_not() -> None:
    bench = Bench()
    bench.begin()
    bench.end("r0", LeaseEnd("revoked"))
    bench.end("t1", LeaseEnd("returned"))
    assert bench.adapt() == []
    bench.replan()
    assert given(bench.adapt()) == [("r0", None)]


def test_workers_that_allow_no_plan_leave_the_last_one_in_force() -> None:
    bench = Bench()
    bench.begin()
    plan = bench.leases.plan
    bench.connected = set()
    bench.now += 100
    assert bench.replan() == []
    assert bench.leases.plan is plan


def test_at_the_end_only_leases_that_have_begun_on_workers_that_are_there_are_awaited() -> None:
    bench = Bench()
    bench.begin()
    bench.lend(0)
    bench.connected.remove("t1")
    bench.end("t0", LeaseEnd("returned"))
    bench.observe()
    begun = {lease.holder for lease in bench.given.values() if lease.worker != "a0"} - {"t0:t0-4.1"}
    assert bench.leases.ids_to_await(begun) == ["r0-1.1"]


class Cluster(RuleBasedStateMachine):
    """Leases of a run whose workers leave, join and lose leases at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(*WORKERS)
        self.revoked: set[str] = set()
        self.trained = -1
        """The last trained iteration."""
        self.is_over = False
        self.last_given: dict[str, float] = {}
        self.do(self.bench.begin())
        self.lend(0)

    def do(self, actions: list[Action]) -> None:
        assert not (self.is_over and given(actions)), "nothing is submitted after the end"
        for action in actions:
            if isinstance(action, Lease):
                self.last_given[action.worker] = self.bench.now
            elif isinstance(action, Revoke):
                self.revoked.add(action.lease_id)

    def lend(self, iteration: int) -> None:
        try:
            self.do(self.bench.lend(iteration))
        except ValueError:
            self.stop()

    def open(self, worker: str) -> list[Lease]:
        """Leases of this worker that go on and were not told to yield."""
        gone = self.bench.ended.keys() | self.revoked
        return [x for x in self.bench.given.values() if x.worker == worker and x.lease_id not in gone]

    @rule(seconds=st.sampled_from([0.1, 1.0, 19.0, 31.0]))
    def wait(self, seconds: float) -> None:
        self.bench.now += seconds

    @rule(worker=st.sampled_from(sorted(WORKERS)))
    def leave_or_join(self, worker: str) -> None:
        self.bench.connected ^= {worker}

    @rule(worker=st.sampled_from(sorted(WORKERS)), how=st.sampled_from(["returned", "lost", "unknown"]))
    def end_lease(self, worker: str, how: Any) -> None:
        if self.open(worker):
            self.bench.end(worker, LOST if how == "lost" else LeaseEnd(how))

    @rule(worker=st.sampled_from(["r0", *AGENTS]))
    def fail(self, worker: str) -> None:
        if self.open(worker):
            self.bench.end(worker, FAILED)

    @precondition(lambda self: self.trained < 3)
    @rule()
    def train(self) -> None:
        """Train an iteration and begin the next one. What was told to yield ends."""
        bench = self.bench
        self.trained = self.trained + 1
        self.revoked |= {lease_id for _, lease_id in bench.leases.to_revoke(self.trained)}
        bench.ended |= dict.fromkeys(self.revoked - bench.ended.keys(), LeaseEnd("revoked"))
        self.do(bench.replan())
        self.lend(self.trained + 1)

    @rule()
    def adapt(self) -> None:
        before = dict(self.last_given)
        actions = self.bench.adapt()
        self.do(actions)
        for action in actions:
            if isinstance(action, Lease):
                self.check_pause(action, before)
        self.is_over = self.is_over or self.bench.leases.nobody_left is not None

    def check_pause(self, lease: Lease, before: dict[str, float]) -> None:
        """A lost lease is not given again before AGAIN_S."""
        same = [x for x in self.bench.given.values() if replace(x, lease_id=lease.lease_id) == lease][:-1]
        if same and self.bench.ended.get(same[-1].lease_id) is LOST:
            assert self.bench.now - before[lease.worker] > AGAIN_S

    def stop(self) -> None:
        self.is_over = True
        self.bench.leases.end()

    def teardown(self) -> None:
        self.stop()
        self.bench.now += 2 * AGAIN_S
        self.do([*self.bench.adapt(), *self.bench.lend(self.trained + 1)])

    @invariant()
    def no_worker_holds_two_leases(self) -> None:
        for worker in WORKERS:
            may_run = [x for x in self.open(worker) if x.after is None or x.after <= self.trained]
            assert len(may_run) <= 1

    @invariant()
    def at_most_one_loan_is_queued_behind_another(self) -> None:
        for worker in WORKERS:
            assert len(self.open(worker)) <= (2 if worker in self.bench.leases.plan.trainers else 1)

    @invariant()
    def what_is_unsettled_has_no_known_end(self) -> None:
        self.bench.observe()
        ends = [self.bench.ended.get(lease_id) for lease_id in self.bench.leases.list_unsettled()]
        assert all(end is None or end.how == "unknown" for end in ends)


TestAnyCluster = Cluster.TestCase
TestAnyCluster.settings = settings(max_examples=100, stateful_step_count=30)
