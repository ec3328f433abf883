"""Which task comes next, by what came of those before."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sf_core.recipes.curriculum import REMEMBERED, Curriculum, Tasks
from sf_core.recipes.outcomes import Outcome, Pick, Result, Success, TaskRef

RULES: list[dict[str, Any]] = [
    {},
    {"solved": 0.0},
    {"solved": 0.5, "unsolved": 0.5, "floor": 0.05},
    {"solved": 0.0, "solved_share": 0.5},
    {"order": "draw"},
    {"order": "draw", "utility": "variance", "explore": 0.5},
    {"order": "draw", "utility": "hard", "solved": 0.0},
    {"sizes": {"fewer": 2, "above": 0.5}},
    {"stages": [{"shares": {"a": 1}, "until": 2}, {"shares": {"a": 1, "b": 3}}]},
]


def tasks_of(rules: dict[str, Any], success: Success | None = None, seed: int = 3, size: int = 4) -> Tasks:
    tasks = Tasks(seed)
    tasks.set_rules(Curriculum.model_validate({"pool": 8, **rules}), success, size, 0)
    return tasks


def outcome(group: int, task: TaskRef, scores: list[float], position: int = 0, need: int = 4) -> Outcome:
    results = tuple(Result(score, score, 1, "ok") for score in scores)
    return Outcome(group, Pick(task, position, need, need), need, 0, results, "sealed")


def of_index(group: int, index: int, scores: list[float]) -> Outcome:
    return outcome(group, TaskRef("", index), scores)


def begin(tasks: Tasks, group: int, batch: int = 0) -> Pick:
    """Begin a group with the task that is picked for it."""
    pick = tasks.pick(group, batch)
    tasks.note(pick)
    return pick


def picked(tasks: Tasks, first: int, num: int, batch: int = 0) -> list[Pick]:
    """The next picks of a run whose groups end at once, without a word of them."""
    picks = []
    for group in range(first, first + num):
        picks.append(begin(tasks, group, batch))
        tasks.release(picks[-1].task)
    return picks


def indices(picks: list[Pick]) -> list[int]:
    return [pick.task.number for pick in picks]


@st.composite
def histories(draw: st.DrawFn) -> list[Outcome]:
    """Outcomes of groups with different numbers."""
    sizes = draw(st.lists(st.integers(0, 4), min_size=1, max_size=40))
    scores = st.sampled_from([0.0, 0.5, 1.0])
    return [
        outcome(
            group,
            TaskRef(draw(st.sampled_from(["", "a", "b"])), draw(st.integers(0, 9))),
            draw(st.lists(scores, min_size=size, max_size=size)),
            draw(st.integers(0, 30)),
        )
        for group, size in enumerate(sizes)
    ]


@given(histories(), st.sampled_from(RULES), st.randoms(), st.data())
def test_however_often_and_in_whatever_order_outcomes_are_told_the_memory_is_the_same(
    history: list[Outcome], rules: dict[str, Any], random: Any, data: st.DataObject
) -> None:
    shuffled = history + random.choices(history, k=10)
    random.shuffle(shuffled)
    cut = data.draw(st.integers(0, len(shuffled)))
    one = tasks_of(rules)
    other = tasks_of(rules)
    # the one is restored after a restart: it is told what the other has picked
    for group in range(data.draw(st.integers(0, 3))):
        one.note(begin(other, 900 + group))
    one.observe(history)
    other.observe(shuffled[:cut])
    other.observe(shuffled[cut:])
    assert (one.past, one.positions, one.in_flight) == (other.past, other.positions, other.in_flight)
    assert picked(one, 500, 10) == picked(other, 500, 10)


@given(histories(), st.sampled_from(RULES), st.sampled_from(RULES), st.integers(1, 12))
def test_rules_that_come_later_judge_what_was_there_before(
    history: list[Outcome], before: dict[str, Any], after: dict[str, Any], pool: int
) -> None:
    changed = tasks_of(before)
    new = tasks_of({"pool": pool, **after})
    changed.observe(history)
    begin(changed, 499)
    changed.set_rules(Curriculum.model_validate({"pool": pool, **after}), None, 4, 0)
    new.observe(history)
    new.in_flight = Counter(changed.in_flight)
    new.positions = dict(changed.positions)
    assert changed.past == new.past
    assert picked(changed, 500, 5) == picked(new, 500, 5)


@given(st.sampled_from(RULES), st.integers(1, 70), st.data())
def test_no_task_is_in_flight_twice_unless_it_is_counted(
    rules: dict[str, Any], pool: int, data: st.DataObject
) -> None:
    tasks = tasks_of({"pool": pool, **rules})
    live: list[tuple[int, Pick]] = []
    for group in range(60):
        busy = {pick.task for _, pick in live}
        repeated = tasks.num_repeated
        pick = begin(tasks, group)
        live.append((group, pick))
        assert 0 <= pick.task.number < pool
        assert pick.task not in busy or tasks.num_repeated == repeated + 1
        assert pick.task not in busy or len({t for t in busy if t.source == pick.task.source}) == pool
        assert tasks.in_flight == Counter(pick.task for _, pick in live)
        for _ in range(data.draw(st.integers(0, len(live)))):
            number, ended = live.pop(0)
            tasks.release(ended.task)
            tasks.observe([outcome(number, ended.task, [data.draw(st.sampled_from([0.0, 1.0]))] * 4)])


def test_without_a_curriculum_each_group_has_the_task_of_its_number() -> None:
    tasks = Tasks(0)
    tasks.set_rules(None, None, 8, 2)
    assert tasks.pick(5, 0) == Pick(TaskRef("", 5), 0, 8, 10)
    tasks.observe([of_index(5, 5, [1.0])])
    assert tasks.past == {}


def test_without_a_pool_each_task_of_a_source_comes_once() -> None:
    tasks = tasks_of({"pool": None, "stages": [{"shares": {"a": 1, "b": 1}}]})
    picks = [begin(tasks, group) for group in range(40)]
    for source in ("a", "b"):
        found = [pick.task.number for pick in picks if pick.task.source == source]
        assert found == [*range(len(found))] and len(found) > 5


def test_an_epoch_has_each_task_once_and_the_next_another_order() -> None:
    found = indices(picked(tasks_of({"pool": 300}), 0, 600))
    assert sorted(found[:300]) == sorted(found[300:]) == [*range(300)] and found[:300] != found[300:]
    assert found != indices(picked(tasks_of({"pool": 300}, seed=4), 0, 600))


def test_solved_tasks_are_not_taken_again_and_unsolved_ones_are() -> None:
    tasks = tasks_of({"solved": 0.0})
    tasks.observe(of_index(i, i, [float(i < 4)] * 4) for i in range(7))
    assert sorted(indices(picked(tasks, 100, 8))) == sorted([4, 5, 6, 7] * 2)
    assert tasks.num_repeated == 0


def test_a_solved_task_comes_back_after_a_group_that_is_not_and_one_short_of_that_never_left() -> None:
    tasks = tasks_of({"pool": 2, "solved": 0.0})
    tasks.observe([of_index(0, 0, [1.0] * 4), of_index(1, 1, [1.0, 1.0, 1.0, 0.0])])
    assert set(indices(picked(tasks, 100, 4))) == {1}
    tasks.observe([of_index(2, 0, [0.0, 1.0, 1.0, 1.0])])
    assert set(indices(picked(tasks, 110, 8))) == {0, 1}


def test_a_group_is_solved_from_the_share_that_is_given() -> None:
    tasks = tasks_of({"pool": 2, "solved": 0.0, "solved_share": 0.75})
    tasks.observe([of_index(0, 0, [1.0, 1.0, 1.0, 0.0]), of_index(1, 1, [1.0, 1.0, 0.0, 0.0])])
    assert set(indices(picked(tasks, 100, 4))) == {1}


def test_what_ended_with_few_of_its_sessions_is_not_solved() -> None:
    tasks = tasks_of({"pool": 2, "solved": 0.0})
    tasks.observe([of_index(0, 0, [1.0]), of_index(1, 1, [1.0, 1.0])])
    assert set(indices(picked(tasks, 100, 4))) == {0}


@pytest.mark.parametrize(
    ("scores", "rules"),
    [([1.0] * 4, {"solved": 0.5}), ([0.0] * 4, {"unsolved": 0.5})],
    ids=["right", "wrong"],
)
def test_the_chance_falls_with_each_group_in_a_row_down_to_the_floor(
    scores: list[float], rules: dict[str, float]
) -> None:
    for num, floor, expected in ((1, 0.0, 0.5), (2, 0.0, 0.25), (8, 0.2, 0.2)):
        tasks = tasks_of({"pool": 2, "floor": floor, **rules})
        tasks.observe(of_index(group, 0, scores) for group in range(num))
        found = indices(picked(tasks, 100, 2000))
        assert found.count(0) / found.count(1) == pytest.approx(expected, abs=0.06)


def test_when_all_are_solved_one_is_taken_all_the_same_and_counted() -> None:
    for pool in (1, 8, 1000):
        tasks = tasks_of({"pool": pool, "solved": 0.0})
        tasks.observe(of_index(i, i, [1.0] * 4) for i in range(pool))
        found = indices(picked(tasks, 10 * pool, 2 * pool))
        assert found == indices(picked(tasks_of({"pool": pool}), 0, 2 * pool))
        assert tasks.num_repeated == 2 * pool


def test_the_one_that_is_left_is_found_wherever_it_is() -> None:
    tasks = tasks_of({"pool": 5000, "solved": 0.0})
    tasks.observe(of_index(i, i, [1.0] * 4) for i in range(5000) if i != 1234)
    assert indices(picked(tasks, 9000, 3)) == [1234] * 3 and tasks.num_repeated == 0


def test_a_pool_of_one_is_taken_again_while_it_is_in_flight() -> None:
    for order in ("epochs", "draw"):
        tasks = tasks_of({"pool": 1, "order": order})
        assert {begin(tasks, group).task.number for group in range(3)} == {0}
        assert tasks.num_repeated == 2 and tasks.in_flight[TaskRef("", 0)] == 3


def shares(tasks: Tasks, num: int = 600) -> dict[int, float]:
    found = Counter(indices(picked(tasks, 10_000, num)))
    return {index: found[index] / num for index in range(8)}


def test_a_draw_prefers_what_its_utility_says() -> None:
    kinds = {0: [0.0] * 8, 1: [1.0] * 8, 2: [0.0] * 4 + [1.0] * 4, 3: [0.0, 1.0, 0.0, 0.0] * 2}

    def told(utility: str) -> dict[int, float]:
        tasks = tasks_of({"pool": 4, "order": "draw", "utility": utility, "explore": 0.0})
        rows = [(index, scores) for index, scores in kinds.items() for _ in range(4)]
        # of task 2 the newer half of the groups is right, and of the others the halves are alike
        for number, (index, scores) in enumerate(rows):
            halves = [float(number % 4 > 1)] * 8 if index == 2 else scores
            tasks.observe([outcome(number, TaskRef("", index), halves, need=8)])
        return shares(tasks)

    assert told("progress")[2] > 0.95
    assert told("variance")[2] > 0.9
    assert told("hard")[3] > 0.6 and told("hard")[1] == 0


def test_a_draw_explores_in_the_order_of_epochs() -> None:
    tasks = tasks_of({"order": "draw", "explore": 1.0})
    assert picked(tasks, 0, 16) == picked(tasks_of({}), 0, 16)


def test_a_task_whose_groups_end_without_results_is_not_drawn_for_ever() -> None:
    for utility in ("progress", "variance", "hard"):
        tasks = tasks_of({"pool": 2, "order": "draw", "utility": utility, "explore": 0.0})
        for group in range(400):
            pick = begin(tasks, group)
            tasks.release(pick.task)
            tasks.observe([outcome(group, pick.task, [0.0, 1.0, 0.0, 1.0] if pick.task.number else [])])
        found = indices(picked(tasks, 1000, 400))
        assert found.count(0) < 200, utility


def test_a_stage_goes_by_the_batch_that_the_group_is_for() -> None:
    tasks = tasks_of({"pool": 64, "stages": [{"shares": {"a": 1}, "until": 4}, {"shares": {"a": 1, "b": 3}}]})
    early = [pick.task.source for batch in range(4) for pick in picked(tasks, batch, 10, batch)]
    late = [pick.task.source for pick in picked(tasks, 1000, 400, batch=4)]
    assert set(early) == {"a"}
    assert late.count("b") / len(late) == pytest.approx(0.75, abs=0.08)


def test_the_places_of_sources_are_their_own() -> None:
    tasks = tasks_of({"pool": 64, "stages": [{"shares": {"a": 1, "b": 1}}]})
    picks = picked(tasks, 0, 128)
    for source in ("a", "b"):
        found = [pick.task.number for pick in picks if pick.task.source == source][:64]
        assert len(set(found)) == len(found) and tasks.positions[source] >= len(found)


def test_easy_tasks_get_fewer_sessions() -> None:
    tasks = Tasks(0)
    rules = Curriculum.model_validate({"pool": 3, "sizes": {"fewer": 2, "above": 0.6}})
    tasks.set_rules(rules, None, 8, 1)
    tasks.observe([of_index(0, 0, [1.0] * 7 + [0.0] * 3), of_index(1, 1, [1.0] * 6 + [0.0] * 4)])
    sizes = {pick.task.number: (pick.need, pick.size) for pick in picked(tasks, 10, 3)}
    assert sizes == {0: (2, 3), 1: (8, 9), 2: (8, 9)}


def test_another_bound_of_success_judges_what_was_remembered() -> None:
    tasks = tasks_of({"pool": 2, "solved": 0.0})
    tasks.observe([of_index(0, 0, [0.5] * 4)])
    assert set(indices(picked(tasks, 10, 4))) == {0, 1}
    assert tasks.rules is not None
    tasks.set_rules(tasks.rules, Success(at_least=0.5), 4, 0)
    assert set(indices(picked(tasks, 20, 4))) == {1}


def test_only_the_last_groups_are_remembered() -> None:
    tasks = tasks_of({})
    tasks.observe(of_index(group, 0, [1.0]) for group in reversed(range(20)))
    assert [past.group for past in tasks.past[TaskRef("", 0)]] == [*range(20 - REMEMBERED, 20)]


def test_external_groups_are_of_no_task() -> None:
    tasks = tasks_of({})
    tasks.observe([Outcome(0, None, 4, 0, (), "sealed")])
    assert tasks.past == {} and tasks.positions == {}


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"pool": 30, "solved": 0.0},
        {"pool": 30, "stages": [{"shares": {"a": 1, "b": 2}, "until": 1}, {"shares": {"c": 1}}]},
    ],
)
def test_the_picks_are_the_same_when_pools_are_weighed_before(rules: dict[str, Any]) -> None:
    told = [outcome(group, TaskRef("a" if "stages" in rules else "", group), [1.0] * 4) for group in range(9)]
    weighed = tasks_of(rules)
    other = tasks_of(rules)
    for tasks in (weighed, other):
        tasks.observe(told)
    weighed.weigh()
    assert [picked(weighed, 10, 20, batch) for batch in (0, 1)] == [
        picked(other, 10, 20, batch) for batch in (0, 1)
    ]
