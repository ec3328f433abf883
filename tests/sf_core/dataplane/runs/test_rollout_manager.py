from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from benchmarks.simulation.rollout import Rollout
from sf_core.config.rollout_config import REASONS, FailureRules, Rule
from sf_core.dataplane.runs import decide
from sf_core.dataplane.runs.groups import Progress
from sf_core.dataplane.sessions.claims import Claim
from sf_core.recipes.curriculum import Curriculum, Sizes
from sf_core.recipes.gates import All, Mixed, Varied
from tests.bench.properties import examples
from tests.sf_core.dataplane.runs import rollouts


def test_whole_groups_are_given_out_in_index_order() -> None:
    claims = rollouts.manager().claim(5)
    assert [(c.slot.group, c.slot.member) for c in claims] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]


def test_no_more_groups_are_admitted_than_the_lag_bound_allows() -> None:
    assert len(rollouts.manager(lag_bound=0).claim(100)) == 1 * 2 * 2
    assert len(rollouts.manager(lag_bound=1).claim(100)) == 2 * 2 * 2


def test_no_group_is_started_that_no_batch_needs() -> None:
    assert len(rollouts.manager(num_batches=1).claim(100)) == 1 * 2 * 2
    assert rollouts.manager(num_batches=0).claim(100) == []


def test_while_memory_is_full_groups_of_the_next_batch_are_begun_one_at_a_time() -> None:
    m = rollouts.manager()
    first, *_ = m.claim(1)
    # a group that has begun is given out whole, and none beside it
    assert decide.num_open_sessions(m, is_full=True) == 1
    [second] = m.claim(100, is_full=True)
    assert (first.slot.group, second.slot.group) == (0, 0)
    rollouts.finish_all(m, [first, second])
    assert decide.num_open_sessions(m, is_full=True) == 2
    rollouts.finish_all(m, m.claim(100, is_full=True))
    assert decide.readiness(m, 0).ready
    assert m.claim(100, is_full=True) == [], "the batch that may be sealed makes room"
    assert decide.num_open_sessions(m, is_full=True) == 0
    m.seal_next(0)
    assert {claim.slot.group for claim in m.claim(100, is_full=True)} == {2}


def test_groups_done_by_earlier_batches_are_not_given_out_again() -> None:
    resumed = Rollout(rollouts.RULES, 1, 100, next_batch=1, version=1, done_groups=[0, 2, 3])
    assert [claim.slot.group for claim in resumed.claim(4)] == [1, 1, 4, 4]


def test_a_batch_is_ready_when_enough_groups_are_complete() -> None:
    m = rollouts.manager()
    claims = m.claim(4)
    rollouts.finish_all(m, claims[:3])
    assert decide.readiness(m, 0).waiting_for == "1 of 2 groups; 1 are in flight"
    rollouts.finish_all(m, claims[3:])
    assert decide.readiness(m, 0).ready
    assert m.seal_next(0).groups == [0, 1]


def test_the_sessions_left_are_those_missing_in_the_groups_that_have_come_furthest() -> None:
    m = rollouts.manager(lag_bound=0)
    assert decide.num_sessions_left(m) == 4
    claims = m.claim(8)
    rollouts.finish_all(m, [claims[0], claims[2], claims[3]])
    assert decide.num_sessions_left(m) == 1
    m.start_evaluation(0, num_tasks=5)
    assert decide.num_sessions_left(m) == 6


def test_what_may_run_ahead_of_the_next_batch_is_left_too() -> None:
    m = rollouts.manager(lag_bound=1, num_batches=2)
    claims = m.claim(8)
    rollouts.finish_all(m, claims[:3])
    assert decide.num_sessions_left(m) == 5
    rollouts.finish_all(m, claims[3:4])
    m.seal_next(0)
    # no batch comes after the second
    assert decide.num_sessions_left(m) == 4


def test_after_the_last_batch_only_held_out_sessions_are_left() -> None:
    m = rollouts.manager(num_batches=1)
    rollouts.finish_all(m, m.claim(4))
    m.seal_next(0)
    assert decide.num_sessions_left(m) == 0


def test_a_straggling_session_holds_back_its_group_and_no_batch() -> None:
    m = rollouts.manager()
    claims = m.claim(100)
    rollouts.finish_all(m, [claim for claim in claims if claim.slot != claims[0].slot])
    assert m.seal_next(0).groups == [1, 2]
    m.end(claims[0], rollouts.got(1.0), 0)
    m.set_version(1)
    assert m.seal_next(1).groups == [0, 3]


def test_a_batch_that_is_not_ready_cannot_be_sealed() -> None:
    with pytest.raises(ValueError, match="waiting for 2 of 2 groups"):
        rollouts.manager().seal_next(0)


def test_a_failed_session_is_given_out_again_and_then_excludes_its_group() -> None:
    m = rollouts.manager()
    first, second, *_ = m.claim(4)
    assert m.end_failed(first, "agent_error") == []
    [again] = m.claim(1)
    assert again == Claim(first.slot, attempt=1, draw=1)
    assert m.end_failed(again, "agent_error") == [0]
    assert m.rejected == {0: "agent_error"}
    assert m.end(second, rollouts.got(1.0), 0) == []
    assert m.claim(1)[0].slot.group == 2


def test_a_session_that_is_given_out_again_is_as_old_as_its_new_attempt() -> None:
    m = rollouts.manager()
    [old] = m.claim(1)
    m.note_started(old, 0)
    m.lose(old)
    assert m.groups[0].min_version is None
    m.set_version(1)
    [new] = m.claim(1)
    m.note_started(new, 1)
    assert m.groups[0].min_version == 1


def test_a_group_is_as_old_as_its_oldest_session() -> None:
    m = rollouts.manager()
    for version, claim in enumerate(m.claim(2)):
        m.note_started(claim, version)
    assert m.groups[0].min_version == 0


def test_a_group_that_is_too_old_for_the_next_batch_is_rejected() -> None:
    """As a restart may find it, with other rules or versions."""
    m = Rollout(rollouts.RULES, 1, 100, next_batch=2, version=2)
    claims = m.claim(4)
    for claim, min_version in zip(claims, (0, 2, 1, 2), strict=True):
        m.end(claim, rollouts.got(1.0), min_version)
    assert m.rejected == {0: "max_lag"}
    assert list(m.groups) == [1]


def test_a_report_of_an_older_attempt_changes_nothing() -> None:
    m = rollouts.manager()
    [old] = m.claim(1)
    m.lose(old)
    [new] = m.claim(1)
    assert m.end(old, rollouts.got(1.0), 0) == []
    assert m.group_of(new) is not None
    assert m.groups[0].num_done == 0


def test_the_varied_gate_rejects_groups_whose_rewards_are_equal() -> None:
    m = rollouts.manager(gate=Varied())
    claims = m.claim(4)
    rollouts.finish_all(m, claims[:2])
    assert m.rejected == {0: "equal_rewards"}
    m.end(claims[2], rollouts.got(1.0), 0)
    m.end(claims[3], rollouts.got(0.0), 0)
    assert list(m.groups) == [1]


def test_rewards_that_differ_by_rounding_only_are_equal() -> None:
    m = rollouts.manager(gate=Varied())
    first, second, *_ = m.claim(2)
    m.end(first, rollouts.got(0.1 + 0.2 + 0.3), 0)
    assert m.end(second, rollouts.got(0.3 + 0.2 + 0.1), 0) == [0]
    assert m.rejected == {0: "equal_rewards"}


def test_with_wait_a_batch_waits_for_groups_that_would_grow_too_old() -> None:
    m = rollouts.manager(lag_bound=0)
    claims = m.claim(4)
    m.set_version(0)
    rollouts.finish_all(m, claims[:2])
    assert not decide.readiness(m, 0).ready
    m = rollouts.manager(lag_bound=1)
    slow, *rest = m.claim(8)
    m.note_started(slow, 0)
    rollouts.finish_all(m, rest)
    assert m.seal_next(0).groups == [1, 2]
    m.set_version(1)
    rollouts.finish_all(m, m.claim(4), version=1)
    assert decide.readiness(m, 1).waiting_for == "groups that would exceed the lag bound of 1: [0]"
    rollouts.finish_all(m, [slow])
    assert m.seal_next(1).groups == [0, 3]


def test_a_batch_leaves_no_more_old_groups_behind_than_later_batches_can_hold() -> None:
    m = rollouts.manager(group_size=1, groups_per_batch=1, lag_bound=2)
    old = m.claim(3)
    for claim in old:
        m.note_started(claim, 0)
    rollouts.finish_all(m, [old[2]])
    assert m.seal_next(0).groups == [2]
    m.set_version(1)
    rollouts.finish_all(m, m.claim(1), version=1)
    # groups 0 and 1 must both be consumed by batch 2: one of them has to go into batch 1
    assert not decide.readiness(m, 1).ready
    rollouts.finish_all(m, [old[1]])
    assert m.seal_next(1).groups == [1]


def test_with_drop_such_groups_are_dropped_whole() -> None:
    m = rollouts.manager(on_max_lag="drop")
    slow, *rest = m.claim(8)
    m.note_started(slow, 0)
    rollouts.finish_all(m, rest)
    m.seal_next(0)
    m.set_version(1)
    rollouts.finish_all(m, m.claim(4), version=1)
    batch = m.seal_next(1)
    assert batch.groups == [3, 4]
    assert (batch.rejected, batch.dropped) == ({0: "max_lag"}, [0])


def test_evaluations_come_first_and_end_also_when_tasks_keep_failing() -> None:
    m = rollouts.manager(session_attempts=1)
    m.start_evaluation(version=3, num_tasks=2)
    first, second, train = m.claim(3)
    assert [c.slot.split for c in (first, second, train)] == ["holdout", "holdout", "train"]
    m.end(first, rollouts.got(1.0), 3)
    assert decide.worth(m, second, "agent_error", can_train=True) == 0.0
    m.end_failed(second, "agent_error")
    assert m.evaluations[3].is_complete
    assert m.evaluations[3].results == (rollouts.got(1.0),)


RETRY = "retry_then_zero"
EXCLUDE = "retry_then_exclude"


@pytest.mark.parametrize("split", ["train", "holdout"])
@pytest.mark.parametrize(
    ("rule", "can_train", "ends_at", "ends_held_out_at"),
    [
        ("zero", True, 1, 1),
        (RETRY, True, 3, 3),
        (EXCLUDE, True, None, 3),
        ("zero", False, None, 3),
        (RETRY, False, None, 3),
        (EXCLUDE, False, None, 3),
    ],
)
def test_a_failure_is_worth_what_its_rule_says_in_training_and_held_out_alike(
    split: str, rule: Rule, can_train: bool, ends_at: int | None, ends_held_out_at: int
) -> None:
    """At which of three attempts it ends with the reward of a failed session; None: its group is left out."""
    m = rollouts.manager(session_attempts=3, on_failure=FailureRules(timeout=rule), failed_reward=-1.0)
    if split == "holdout":
        m.start_evaluation(0, num_tasks=1)
    expected = ends_at if split == "train" else ends_held_out_at
    for attempt in range(1, 4):
        [claim] = m.claim(1)
        assert (claim.slot.split, claim.attempt) == (split, attempt - 1)
        worth = decide.worth(m, claim, "timeout", can_train)
        if attempt == expected:
            assert worth == -1.0
            return
        assert worth is None
        rejected = m.end_failed(claim, "timeout")
    assert expected is None and rejected == [0]


def test_what_a_session_that_no_longer_counts_was_worth_changes_nothing() -> None:
    m = rollouts.manager()
    [claim] = m.claim(1)
    m.lose(claim)
    assert decide.worth(m, claim, "timeout", can_train=True) is None


@pytest.mark.parametrize("rule", ["zero", EXCLUDE])
def test_overlong_sessions_cost_no_group_of_16_where_they_count(rule: Rule) -> None:
    """One of 20 sessions runs out of context, every time that it is tried: most groups have one of them."""
    rules = FailureRules(context_overflow=rule)
    m = rollouts.manager(group_size=16, groups_per_batch=100, lag_bound=0, on_failure=rules)
    places = [(group, member) for group in range(100) for member in range(16)]
    overlong = set(random.Random(4).sample(places, len(places) // 20))
    while not decide.readiness(m, 0).ready:
        for claim in m.claim(10_000):
            is_overlong = (claim.slot.group, claim.slot.member) in overlong
            worth = decide.worth(m, claim, "context_overflow", can_train=True) if is_overlong else 1.0
            if worth is None:
                m.end_failed(claim, "context_overflow")
            else:
                m.end(claim, rollouts.got(worth), 0)
    batch = m.seal_next(0)
    hit = {group for group, _ in overlong}
    assert len(hit) > 50
    assert batch.rejected == ({} if rule == "zero" else dict.fromkeys(sorted(hit), "context_overflow"))
    assert len(batch.groups) == 100
    assert hit.issubset(batch.groups) == (rule == "zero")


def test_restored_sessions_are_not_given_out_again() -> None:
    m = rollouts.manager()
    lost, kept, *_ = m.claim(4)
    restored = rollouts.begun_as(m)
    restored.note_given_out(lost)
    restored.note_given_out(kept)
    restored.finish(kept, rollouts.got(1.0), 0)
    restored.reject(1, "agent_error")
    assert restored.claim(3) == [Claim(lost.slot, 1), *rollouts.manager().claim(6)[4:]]


def test_every_batch_has_places_for_external_groups_and_admits_no_more() -> None:
    m = rollouts.manager(groups_per_batch=3, outside_groups=1)
    declared = [m.claim_external(4), m.claim_external(2), m.claim_external(2)]
    assert [len(claims) for claims in declared] == [4, 2, 0], "one for each batch that the lag bound admits"
    inside = m.claim(100)
    assert len(inside) == 2 * 2 * 2 and not any(claim.is_external for claim in inside)
    rollouts.finish_all(m, inside)
    assert decide.readiness(m, 0).waiting_for == "1 of 1 external groups; 2 are in flight"
    rollouts.finish_all(m, declared[0])
    assert m.seal_next(0).groups == [0, 2, 3]
    m.set_version(1)
    assert len(m.claim_external(2)) == 2
    assert rollouts.manager().claim_external(2) == []


@pytest.mark.parametrize("rule", [RETRY, EXCLUDE])
def test_an_external_session_is_not_tried_again(rule: Rule) -> None:
    m = rollouts.manager(outside_groups=2, on_failure=FailureRules(agent_error=rule), failed_reward=-1.0)
    claim, other = m.claim_external(2)
    worth = decide.worth(m, claim, "agent_error", can_train=True)
    assert worth == (-1.0 if rule == RETRY else None)
    if worth is None:
        assert m.end_failed(claim, "agent_error") == [claim.slot.group]
        assert m.rejected == {claim.slot.group: "agent_error"}
        assert m.group_of(other) is None


def test_held_out_tasks_are_given_to_external_agents_and_again_after_a_failure() -> None:
    m = rollouts.manager(groups_per_batch=2, outside_groups=2)
    assert m.claim_held_out(5) == []
    m.start_evaluation(0, num_tasks=3)
    first, second, third = m.claim_held_out(5)
    assert all(claim.is_external for claim in (first, second, third))
    m.end_failed(first, "agent_error")
    [again] = m.claim(5)
    assert (again.slot, again.is_external) == (first.slot, False)


CURRICULA = [
    Curriculum(pool=5, solved=0.0),
    Curriculum(pool=30, order="draw", sizes=Sizes(fewer=1, above=0.4)),
    Curriculum(pool=1, order="draw"),
]


class AnyRun(RuleBasedStateMachine):
    """Sessions, failures, updates and batches in any order (invariant 8)."""

    @initialize(
        groups_per_batch=st.integers(1, 3),
        outside_groups=st.integers(0, 3),
        lag_bound=st.integers(0, 3),
        on_max_lag=st.sampled_from(["wait", "drop"]),
        gate=st.sampled_from([All(), Varied(), Mixed()]),
        is_full=st.booleans(),
        spare_sessions=st.integers(0, 2),
        least_sessions=st.sampled_from([None, 1]),
        curriculum=st.sampled_from([None, *CURRICULA]),
    )
    def begin(self, is_full: bool, outside_groups: int, groups_per_batch: int, **rules: Any) -> None:
        self.stays_full = is_full
        rules["outside_groups"] = min(outside_groups, groups_per_batch)
        self.manager = rollouts.manager(groups_per_batch=groups_per_batch, **rules)
        self.declared: dict[int, int] = {}
        self.running: list[Claim] = []
        self.sampled: dict[Claim, int] = {}
        self.min_versions: dict[int, dict[int, int]] = {}
        self.consumed: set[int] = set()

    @property
    def has_sizes(self) -> bool:
        curriculum = self.manager.rules.curriculum
        return curriculum is not None and curriculum.sizes is not None

    @rule(count=st.integers(1, 4), is_full=st.booleans())
    def claim(self, count: int, is_full: bool) -> None:
        before = self.begun()
        num_open = decide.num_open_sessions(self.manager, is_full)
        claimed = self.manager.claim(count, is_full)
        if self.has_sizes:
            assert len(claimed) <= min(count, num_open)
        else:
            assert len(claimed) == min(count, num_open)
        if is_full:
            assert self.begun() == before or (not before and len(self.begun()) == 1)
        self.running += claimed

    def begun(self) -> list[int]:
        groups = self.manager.groups.values()
        return [group.index for group in groups if not group.is_complete and not group.is_external]

    @rule(size=st.integers(1, 3))
    def declare(self, size: int) -> None:
        if claims := self.manager.claim_external(size):
            assert len(claims) == size and len({claim.slot.group for claim in claims}) == 1
            self.declared[claims[0].slot.group] = size
            self.running += claims

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def sample(self, data: st.DataObject) -> None:
        claim = data.draw(st.sampled_from(self.running))
        self.manager.note_started(claim, self.manager.version)
        self.sampled.setdefault(claim, self.manager.version)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), reward=st.sampled_from([0.0, 1.0]))
    def finish(self, data: st.DataObject, reward: float) -> None:
        self.end(data.draw(st.sampled_from(self.running)), reward)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), failed=st.booleans())
    def fail_or_lose(self, data: st.DataObject, failed: bool) -> None:
        claim = data.draw(st.sampled_from(self.running))
        if not failed and not claim.is_external:
            self.running.remove(claim)
            return self.manager.lose(claim)
        reason = data.draw(st.sampled_from(REASONS))
        worth = decide.worth(self.manager, claim, reason, can_train=claim in self.sampled)
        if worth is not None:
            return self.end(claim, worth)
        self.running.remove(claim)
        self.manager.end_failed(claim, reason)

    @precondition(lambda self: self.manager.version < self.manager.next_batch)
    @rule()
    def publish(self) -> None:
        self.manager.set_version(self.manager.version + 1)

    @precondition(lambda self: decide.readiness(self.manager, self.manager.next_batch).ready)
    @rule()
    def seal(self) -> None:
        k = self.manager.next_batch
        rules = self.manager.rules
        before = dict(self.manager.groups)
        batch = self.manager.seal_next(k)
        assert len(set(batch.groups)) == rules.groups_per_batch
        assert self.consumed.isdisjoint(batch.groups)
        assert self.consumed.isdisjoint(batch.rejected)
        self.consumed.update(batch.groups)
        assert sum(group in self.declared for group in batch.groups) == rules.outside_groups
        for group in batch.groups:
            members = before[group].members
            counted = {i for i, member in enumerate(members) if member.result is not None}
            assert len(counted) in self.sizes_of(group)
            assert {member.progress for member in members} <= {Progress.DONE, Progress.CUT}
            assert k - min(self.min_versions[group][i] for i in counted) <= self.manager.lag_bound
        told = [outcome.group for outcome in self.manager.ended_by[k]]
        assert len(told) == len(set(told)), "a group was told twice"
        assert set(told) == {*batch.groups, *batch.rejected}
        if rules.on_max_lag == "wait":
            assert "max_lag" not in batch.rejected.values()

    def sizes_of(self, group: int) -> range:
        """How many sessions of a group may count."""
        rules = self.manager.rules
        if group in self.declared:
            return range(self.declared[group], self.declared[group] + 1)
        is_fixed = rules.least_sessions is None and not self.has_sizes
        return range(rules.group_size if is_fixed else 1, rules.group_size + 1)

    @invariant()
    def tasks_in_flight_are_those_of_groups(self) -> None:
        if hasattr(self, "manager"):
            groups = self.manager.groups.values()
            assert self.manager.tasks.in_flight == Counter(g.pick.task for g in groups if g.pick)

    def end(self, claim: Claim, reward: float) -> None:
        self.running.remove(claim)
        self.sample_if_needed(claim)
        place = claim.slot
        if self.manager.group_of(claim) is not None:
            self.min_versions.setdefault(place.group, {})[place.member] = self.sampled[claim]
        self.manager.end(claim, rollouts.got(reward), self.sampled[claim])

    def sample_if_needed(self, claim: Claim) -> None:
        self.manager.note_started(claim, self.manager.version)
        self.sampled.setdefault(claim, self.manager.version)

    def teardown(self) -> None:
        """Whatever happened, batches get ready once sessions finish."""
        if not hasattr(self, "manager"):
            return
        target = self.manager.next_batch + 2
        while self.manager.next_batch < target:
            while self.manager.version < self.manager.next_batch:
                self.publish()
            while not decide.readiness(self.manager, self.manager.next_batch).ready:
                self.running += self.manager.claim(1000, self.stays_full)
                self.declare(size=2)
                assert self.running, "nothing runs and the batch is not ready: a deadlock"
                for claim in list(self.running):
                    self.end(claim, float(claim.slot.member))
            self.seal()


TestAnyRun = AnyRun.TestCase
TestAnyRun.settings = settings(max_examples=examples(150), stateful_step_count=60, deadline=None)
