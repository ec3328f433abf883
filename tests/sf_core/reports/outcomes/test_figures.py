from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sf_core.recipes.outcomes import Success
from sf_core.reports.iterations import kinds_in, kinds_text
from sf_core.reports.outcomes.figures import (
    count_sources,
    count_tasks,
    extreme_tasks,
    rollout_metrics,
)
from storage.manifests import Manifest
from tests.bench.runs import group_row

RIGHT = Success()


def manifest(**data: Any) -> Manifest:
    return Manifest(run_id="r", iteration=0, stage="rollout", attempt=1, data=data)


def test_kinds_of_groups_are_known_of_runs_that_choose() -> None:
    told = manifest(right=1, mixed=6, wrong=2, length_kept=10.5, length_cut=None, cut_sessions=0)
    assert kinds_in(told) == {"right": 1, "mixed": 6, "wrong": 2}
    assert kinds_text(kinds_in(told)) == "1/6/2"
    assert rollout_metrics(told) == {
        "groups_right": 1,
        "groups_mixed": 6,
        "groups_wrong": 2,
        "length_kept": 10.5,
        "cut_sessions": 0,
    }
    for silent in (manifest(rejected={"3": "equal_rewards"}), None):
        assert kinds_in(silent) is None and rollout_metrics(silent) == {}
        assert kinds_text(kinds_in(silent)) == ""


def test_a_task_counts_by_its_newest_group() -> None:
    rows = [
        group_row(9, [1, 1], task_index=3, task_id="sums-3"),
        group_row(4, [1, 0], task_index=3, task_id="sums-3"),
        group_row(5, [], task_index=3, task_id="", verdict="failed"),
    ]
    [task] = count_tasks(rows, RIGHT)
    assert (task.source, task.number, task.task_id) == ("sums", 3, "sums-3")
    assert (task.groups, task.sessions, task.right, task.tokens) == (3, 4, 3, 40)
    assert task.newest == (9, "right")
    found = count_sources([task], pool=4, sources=["sums", "words"])
    assert (found["sums"].unseen, found["sums"].kinds["right"]) == (3, 1)
    assert (found["words"].unseen, found["words"].groups) == (4, 0)


def test_success_says_which_sessions_are_right() -> None:
    [task] = count_tasks([group_row(0, [0.4, 0.6], rewards=[9.0, 0.0])], Success(at_least=0.5))
    assert (task.right, task.newest) == (1, (0, "mixed"))


def test_external_groups_have_no_task() -> None:
    assert count_tasks([group_row(0, [1.0], task_index=None)], RIGHT) == []


def test_tasks_beyond_a_pool_that_has_become_smaller_leave_its_number_of_unseen_ones() -> None:
    tasks = count_tasks([group_row(k, [1.0], task_index=k) for k in (0, 7)], RIGHT)
    assert count_sources(tasks, pool=2)["sums"].unseen == 1
    assert count_sources(tasks, pool=None)["sums"].unseen is None


def test_among_equal_shares_the_costly_ones_come_first() -> None:
    costs = {0: 10, 1: 30, 2: 20}
    tasks = count_tasks([group_row(k, [0.0], tokens=[cost]) for k, cost in costs.items()], RIGHT)
    hardest, easiest = extreme_tasks(tasks, 5)
    assert [task.number for task in hardest] == [1, 2]
    assert [task.number for task in easiest] == [0]


groups = st.lists(
    st.builds(
        lambda number, source, task, scores: group_row(number, scores, source=source, task_index=task),
        st.integers(0, 99),
        st.sampled_from(["", "sums", "words"]),
        st.integers(0, 9),
        st.lists(st.sampled_from([0.0, 1.0]), max_size=4),
    ),
    unique_by=lambda row: row["number"],
)


@given(groups, st.randoms(use_true_random=False), st.integers(1, 12))
def test_every_task_of_a_pool_is_counted_once_in_whatever_order(
    rows: list[dict[str, Any]], random: Any, most: int
) -> None:
    shuffled = random.sample(rows, len(rows))
    tasks = count_tasks(rows, RIGHT)
    again = count_tasks(shuffled, RIGHT)
    for task in (*tasks, *again):
        task.task_id = ""  # that of any of its groups
    assert tasks == again
    found = count_sources(tasks, pool=10)
    for figures in found.values():
        assert (figures.unseen or 0) + sum(figures.kinds.values()) == 10
    assert sum(figures.groups for figures in found.values()) == len(rows)
    assert sum(figures.tokens for figures in found.values()) == sum(sum(row["tokens"]) for row in rows)

    hardest, easiest = extreme_tasks(tasks, most)
    assert max(len(hardest), len(easiest)) <= most
    names = [(task.source, task.number) for task in (*hardest, *easiest)]
    assert len(names) == len({*names})
    assert all(hard.share <= easy.share for hard in hardest for easy in easiest)
