"""Which answers of two versions are shown side by side."""

from __future__ import annotations

import doctest
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sf_core.reports.evaluations import comparison
from sf_core.reports.evaluations.comparison import (
    SHOWN,
    Answers,
    GivenAnswer,
    choose_examples,
    compare_ends,
    share_rows,
    side_by_side,
    write_greedy,
)
from sf_core.reports.tables import answers_table
from sf_core.reports.view import RunView
from storage.run_directory import RunDirectory
from tests.bench.reports.evaluations import measure
from tests.bench.runs import configure


def earned(*rewards: Sequence[float | None]) -> Answers:
    return {
        f"t{task}": [GivenAnswer(f"ask {task}", f"answer {i}", reward) for i, reward in enumerate(own)]
        for task, own in enumerate(rewards)
    }


def test_better_and_worse_tasks_are_shown_in_the_proportion_of_the_evaluation(
    empty_run: RunDirectory,
) -> None:
    configure(empty_run)
    before = [0.0] * 30 + [1.0] * 4 + [1.0] * 30
    after = [1.0] * 30 + [0.0] * 4 + [1.0] * 30
    for version, rewards in ((0, before), (4, after)):
        measure(empty_run, {f"t{i}": [reward] for i, reward in enumerate(rewards)}, version)
    view = RunView.open(empty_run.uri)
    shown = side_by_side(view, 0, 4)
    changes = [(old.text, new.text) for old, new in shown.pairs]
    assert changes == [("say 0", "say 1")] * 7 + [("say 1", "say 0")]
    assert shown.selection == (
        "of 64 held-out tasks, 30 became better and 4 became worse; 7 and 1 of them are shown"
    )
    assert compare_ends(view, [0, 2, 4]) == (0, 4, shown)
    assert side_by_side(view, 0, 3).pairs == [] == compare_ends(view, [4])[2].pairs


def test_tasks_that_earned_the_same_fill_the_rows() -> None:
    shown = choose_examples(earned(*[[0.5]] * 9, [0.0]), earned(*[[0.5]] * 9, [1.0]))
    assert [new.reward for _, new in shown.pairs] == [1.0, *[0.5] * (SHOWN - 1)]
    assert shown.selection == (
        "of 10 held-out tasks, 1 became better and 0 became worse; 1 and 0 of them are shown, "
        "and 7 of the others"
    )


def test_of_several_answers_those_are_shown_that_changed_as_the_task_did() -> None:
    shown = choose_examples(earned([0.0, 0.0, 1.0]), earned([0.0, 1.0, 1.0]))
    assert [(old.text, new.reward) for old, new in shown.pairs] == [("answer 1", 1.0)]


def test_a_task_that_was_not_judged_is_neither_better_nor_worse() -> None:
    shown = choose_examples(earned([0.0], [None]), earned([None], [1.0]))
    assert (shown.tasks, shown.better, shown.worse, len(shown.pairs)) == (2, 0, 0, 2)


@given(st.integers(0, 300), st.integers(0, 300), st.integers(2, 12))
def test_rows_are_filled_and_each_kind_that_exists_has_one(better: int, worse: int, rows: int) -> None:
    more, less = share_rows(better, worse, rows)
    assert more + less == min(rows, better + worse)
    assert min(1, better) <= more <= better and min(1, worse) <= less <= worse
    # nearer to the proportion than one row, but for the row that each kind has
    assert abs(less - (more + less) * worse / max(1, better + worse)) <= 1


def test_greedy_answers_are_shown_where_they_are_others(empty_run: RunDirectory) -> None:
    configure(empty_run)
    for version, reward in ((0, 0.0), (4, 1.0)):
        measure(empty_run, {"a": [reward], "b": [reward]}, version)
    greedy = {"a": GivenAnswer("ask a", "say 1", 1.0), "b": GivenAnswer("ask b", "well", 0.5)}
    write_greedy(empty_run, 4, greedy)
    shown = side_by_side(RunView.open(empty_run.uri), 0, 4)
    assert [new.greedy for _, new in shown.pairs] == [None, greedy["b"]]
    assert shown.selection.endswith("; these answers are sampled, greedy ones are at temperature 0")
    table = answers_table(shown.pairs, "before", "after")
    assert [column.header for column in table.columns] == ["task", "before", "after", "after, greedy"]
    assert [str(cell) for cell in table.columns[3].cells] == ["", "0.50  well"]
    Path(empty_run.greedy_file(4)).write_text("[]", encoding="utf-8")
    with pytest.raises(ValueError, match=r"greedy/v00004\.json: cannot be read: "):
        side_by_side(RunView.open(empty_run.uri), 0, 4)


def test_examples_hold() -> None:
    assert doctest.testmod(comparison).failed == 0
