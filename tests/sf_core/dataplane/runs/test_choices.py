"""What is sampled and what is kept: tasks by a curriculum, spare sessions, and groups with fewer of them."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.simulation.rollout import Rollout
from sf_core.dataplane.runs import decide
from sf_core.dataplane.runs.groups import Progress
from sf_core.recipes.curriculum import Curriculum, Sizes, Stage
from sf_core.recipes.gates import Varied
from sf_core.recipes.outcomes import Pick, Result, Success, TaskRef
from tests.sf_core.dataplane.runs import rollouts
from tests.sf_core.dataplane.runs.rollouts import got, manager

POOL = Curriculum(pool=20)


def progress(m: Rollout, group: int) -> str:
    return " ".join(member.progress.name for member in m.groups[group].members)


def test_a_group_is_complete_with_the_sessions_that_it_needs_and_the_others_are_cut() -> None:
    m = manager(spare_sessions=2)
    first, second, third, fourth, *_ = m.claim(100)
    assert fourth.slot[1:] == (0, 3), "two are needed and two are spare"
    rollouts.finish_all(m, [second], reward=0.5)
    assert not m.groups[0].is_complete and m.groups[0].num_left == 1
    m.lose(first)
    rollouts.finish_all(m, [fourth], reward=0.25)
    assert progress(m, 0) == "CUT DONE CUT DONE"
    assert m.groups[0].num_open == 0, "what was lost is not given out again"
    assert m.end(third, got(1.0), 0) == []
    assert m.groups[0].results == (got(0.5), got(0.25)), "the first to end count"
    assert m.end_failed(third, "timeout") == []


def test_the_age_of_a_group_is_that_of_the_sessions_that_count() -> None:
    m = manager(spare_sessions=1)
    first, second, third, *_ = m.claim(3)
    m.note_started(first, 0)
    for claim in (second, third):
        m.end(claim, got(1.0), 3)
    assert m.groups[0].min_version == 3


def test_a_spare_session_takes_the_place_of_one_that_failed_for_good() -> None:
    m = manager(session_attempts=1, spare_sessions=1)
    first, second, third, *_ = m.claim(3)
    assert m.end_failed(first, "agent_error") == []
    assert progress(m, 0) == "CUT RUNNING RUNNING"
    assert m.end_failed(second, "agent_error") == [0], "only one was spare"
    assert m.rejected == {0: "agent_error"}
    assert m.group_of(third) is None


@pytest.mark.parametrize("least", [1, 2])
def test_a_group_goes_on_without_those_that_failed_for_good_down_to_the_least(least: int) -> None:
    m = manager(group_size=3, session_attempts=2, least_sessions=least)
    first, second, third, *_ = m.claim(3)
    assert m.end_failed(first, "agent_error") == []
    [again] = m.claim(1)
    assert again.slot == first.slot, "it is tried again first"
    assert m.end_failed(again, "agent_error") == []
    assert (progress(m, 0), m.groups[0].need) == ("CUT RUNNING RUNNING", 2)
    rollouts.finish_all(m, [second])
    m.end_failed(third, "agent_error")
    [last] = [claim for claim in m.claim(1) if claim.slot == third.slot]
    assert m.end_failed(last, "agent_error") == ([0] if least == 2 else [])
    assert m.rejected == ({0: "agent_error"} if least == 2 else {})
    if least == 1:
        assert m.groups[0].is_complete and m.groups[0].results == (got(1.0),)


def test_the_gate_judges_a_group_that_the_failure_of_a_session_makes_complete() -> None:
    m = manager(session_attempts=1, least_sessions=1, gate=Varied())
    first, second, *_ = m.claim(2)
    rollouts.finish_all(m, [first])
    assert m.end_failed(second, "agent_error") == [0]
    assert m.rejected == {0: "equal_rewards"}


def test_the_gate_judges_by_success_where_that_is_said() -> None:
    m = manager(gate=Varied(), success=Success(at_least=0.5))
    for reward, score in ((0.9, 0.9), (0.6, 0.6)):
        [claim] = m.claim(1)
        m.end(claim, Result(reward, score, 1, "finished"), 0)
    assert m.rejected == {0: "one_outcome"}


def test_a_curriculum_is_told_of_a_group_when_it_leaves_and_not_before() -> None:
    m = manager(curriculum=POOL, gate=Varied())
    claims = m.claim(4 * 2)
    for claim in claims[2:]:
        m.end(claim, got(float(claim.slot.member)), 0)
    picks = {index: group.pick for index, group in m.groups.items()}
    assert decide.readiness(m, 0).ready and m.tasks.past == {}
    rollouts.finish_all(m, claims[:2])
    assert m.rejected == {0: "equal_rewards"}
    assert [past[0].group for past in m.tasks.past.values()] == [0], "dropped groups count too"
    batch = m.seal_next(0)
    assert batch.groups == [1, 2]
    assert sorted(past[0].group for past in m.tasks.past.values()) == [0, 1, 2]
    told = m.ended_by[0]
    assert [(one.group, one.verdict) for one in told] == [(0, "equal_rewards"), (1, "sealed"), (2, "sealed")]
    assert [one.pick for one in told] == [picks[0], picks[1], picks[2]]
    assert told[1].results == (got(0.0), got(1.0))


def test_no_task_is_in_flight_twice_while_another_is_free() -> None:
    m = manager(curriculum=Curriculum(pool=5), groups_per_batch=3)
    claims = m.claim(5 * 2)
    assert len({m.task_of(claim) for claim in claims}) == 5
    assert m.tasks.num_repeated == 0
    m.claim(100)
    assert (len(m.groups), m.tasks.num_repeated) == (6, 1), "the sixth had to be one of the five"


def test_a_task_of_which_most_is_right_gets_fewer_sessions() -> None:
    rules = {"curriculum": Curriculum(pool=1, sizes=Sizes(fewer=2, above=0.6)), "group_size": 4}
    m = manager(groups_per_batch=1, lag_bound=0, **rules)
    rollouts.finish_all(m, m.claim(4))
    m.seal_next(0)
    m.set_version(1)
    assert [claim.slot[1:] for claim in m.claim(100)] == [(1, 0), (1, 1)]


def test_stages_go_by_the_batch_that_a_group_would_fill() -> None:
    stages = (Stage(shares={"a": 1}, until=1), Stage(shares={"b": 1}))
    m = manager(curriculum=Curriculum(pool=20, stages=stages))
    m.claim(100)
    assert [group.pick and group.pick.task.source for group in m.groups.values()] == ["a", "a", "b", "b"]


def test_groups_that_were_dropped_in_a_row_are_counted_by_reason() -> None:
    m = manager(gate=Varied(), session_attempts=1)
    first, second, third, _, fifth, sixth, *rest = m.claim(8)
    rollouts.finish_all(m, [first, second])
    m.end_failed(third, "timeout")
    assert m.dropped_in_a_row == {"equal_rewards": 1, "timeout": 1}
    m.end(fifth, got(1.0), 0)
    m.end(sixth, got(0.0), 0)
    assert m.dropped_in_a_row == {}
    rollouts.finish_all(m, rest)
    assert m.dropped_in_a_row == {"equal_rewards": 1}, "those before one that counts are forgotten"


def test_external_groups_that_are_dropped_do_not_end_a_run() -> None:
    m = manager(outside_groups=2)
    m.end_failed(m.claim_external(2)[0], "agent_error")
    assert m.rejected == {0: "agent_error"}
    assert not m.dropped_in_a_row


# --- after a restart


def test_picks_and_the_place_in_the_order_are_restored() -> None:
    m = manager(curriculum=POOL)
    m.claim(3 * 2)
    again = rollouts.begun_as(m, curriculum=POOL)
    assert (again.tasks.positions, again.tasks.in_flight) == (m.tasks.positions, m.tasks.in_flight)
    assert m.tasks.positions[""] == max(g.pick.position for g in m.groups.values() if g.pick) > 0
    m.claim(2)
    again.claim(100)
    assert [g.pick for g in again.groups.values()][:4] == [g.pick for g in m.groups.values()]


def test_a_session_given_out_while_the_end_was_recorded_that_completed_its_group_does_not_run() -> None:
    m = manager(curriculum=POOL, spare_sessions=1)
    m.begin(0, Pick(TaskRef("", 7), 1, 2, 3), 0)
    first, second, third, *_ = manager(spare_sessions=1).claim(3)
    for claim in (first, second):
        assert m.open(claim)
        m.finish(claim, got(1.0), 0)
    assert not m.open(third)
    assert progress(m, 0) == "DONE DONE CUT"
    m.finish(third, got(0.0), 0)
    assert m.groups[0].results == (got(1.0), got(1.0)), "its end was recorded too late"
    assert m.groups[0].members[2].progress is Progress.CUT


def test_what_ended_while_a_batch_was_written_is_told_with_the_next_one() -> None:
    rules: dict[str, Any] = {"curriculum": POOL, "gate": Varied(), "groups_per_batch": 1}
    m = manager(**rules)
    claims = m.claim(4)
    again = rollouts.begun_as(m, **rules)
    for which in (m, again):
        for claim in claims[:2]:
            which.finish(claim, got(float(claim.slot.member)), 0)
    batch = m.seal_next(0)
    for which in (m, again):
        for claim in claims[2:]:
            which.finish(claim, got(1.0), 0)
        which.reject(1, "equal_rewards")
    again.seal(0, batch)
    assert (again.ended, again.ended_by) == (m.ended, m.ended_by)
    assert [outcome.group for outcome in again.ended] == [1]
    assert again.tasks.past == m.tasks.past


def test_a_group_begun_by_an_attempt_that_chose_nothing_keeps_its_sessions() -> None:
    pick = Pick(TaskRef("", 0), 0, 2, 2)
    again = manager()
    again.begin(0, pick, 0)
    first, second = manager().claim(2)
    assert again.open(first)
    again.finish(first, got(0.5), 0)
    assert again.open(second)
    again.set_rules(again.rules.model_copy(update={"gate": Varied()}), 1, 100)
    # an earlier version told the same pick again
    again.begin(0, pick, 3)
    assert again.groups[0].version == 3
    assert progress(again, 0) == "DONE RUNNING"
    assert again.tasks.in_flight == {TaskRef("", 0): 1}
    assert second.attempt == again.groups[0].members[1].attempt


def test_a_group_that_an_earlier_version_gave_another_task_goes_on_counting_attempts() -> None:
    again = manager(curriculum=POOL)
    again.begin(0, Pick(TaskRef("", 0), 0, 2, 2), 0)
    again.note_given_out(manager().claim(1)[0])
    again.begin(0, Pick(TaskRef("", 7), 3, 1, 1), 2)
    assert again.tasks.in_flight == {TaskRef("", 7): 1}
    assert (again.groups[0].size, again.groups[0].version) == (1, 2)
    assert again.claim(1)[0].session_id("run") == "run.g0.0.a1"


def test_what_a_batch_has_taken_is_not_told_as_rejected_by_the_rules_of_now() -> None:
    m = manager(groups_per_batch=1)
    claims = m.claim(2)
    again = rollouts.begun_as(m, groups_per_batch=1, gate=Varied())
    for claim in claims:
        m.end(claim, got(1.0), 0)
        again.finish(claim, got(1.0), 0)
    again.seal(0, m.seal_next(0))
    assert again.rejected == {}
