"""How versions compare: pairs of answers, intervals, pass@k."""

from __future__ import annotations

import doctest
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sf_core.reports.evaluations import comparison
from sf_core.reports.evaluations.comparison import (
    answers_of,
    bootstrap,
    compare,
    pass_at,
    read_comparisons,
    version_of,
    write_comparison,
)
from sf_core.reports.view import RunView
from storage.run_directory import RunDirectory
from storage.tables.trajectories import write_trajectories
from tests.bench import runs
from tests.bench.reports import evaluations


def measured(root: Path, name: str, rewards: evaluations.Rewards, num_tasks: int = 0) -> str:
    run = RunDirectory(str(root / name))
    answers = max(map(len, rewards.values()))
    runs.configure(run, evaluate={"num_tasks": num_tasks or len(rewards), "answers": answers})
    evaluations.measure(run, rewards)
    return run.uri


def test_versions_are_compared_task_by_task(tmp_path: Path) -> None:
    before = measured(tmp_path, "v00000-a", {"a": [0, 1], "b": [0, 0], "c": [1, 1]})
    after = measured(tmp_path, "v00007-a", {"a": [1, 1], "b": [1, 0], "c": [1, 0]})
    found = compare(after, before, ["rollout.temperature=0"])
    assert found.before is not None and found.interval is not None
    assert (found.before.version, found.after.version, found.tasks, found.answers) == (0, 7, 3, 2)
    assert (found.won, found.lost) == (2, 1)
    assert found.difference == pytest.approx((0.5 + 0.5 - 0.5) / 3)
    assert found.interval[0] <= found.difference <= found.interval[1]
    assert found.before.reward == pytest.approx(0.5)
    assert found.after.solved == {1: pytest.approx(2 / 3), 2: 1.0}
    assert [(old and old.text, new.text) for old, new in found.examples] == [
        ("say 0", "say 1"),
        ("say 0", "say 1"),
        ("say 1", "say 0"),
    ]
    file = write_comparison(str(tmp_path), "one", found)
    assert Path(file).name == "one.json"
    [stored] = read_comparisons(str(tmp_path))
    assert (stored["difference"], stored["won"]) == (found.difference, 2)


def test_sessions_that_failed_without_an_answer_count_as_failed(tmp_path: Path) -> None:
    before = measured(tmp_path, "v00000-a", {"a": [1.0, 1.0], "b": [1.0, 1.0]}, num_tasks=4)
    after = measured(tmp_path, "v00001-a", {"a": [1.0], "c": [1.0, 1.0]}, num_tasks=4)
    found = compare(after, before, [])
    assert found.before is not None and found.tasks == 4
    assert (found.before.reward, found.after.reward) == (0.5, pytest.approx(1.5 / 4))
    # half of a and all of b were lost, c was won, and of the fourth nobody knows
    assert (found.won, found.lost, found.difference) == (1, 2, pytest.approx(-0.5 / 4))
    assert found.after.solved == {1: pytest.approx(1.5 / 4), 2: pytest.approx(2 / 4)}


def test_answers_that_were_not_judged_do_not_count(tmp_path: Path) -> None:
    before = measured(tmp_path, "v00000-a", {"a": [1.0, None], "b": [0.0, 0.0], "c": [1.0, 1.0]})
    after = measured(tmp_path, "v00001-a", {"a": [0.0, 1.0], "b": [1.0, 1.0], "c": [None, None]})
    found = compare(after, before, [])
    assert found.before is not None
    assert (found.before.reward, found.after.reward) == (pytest.approx(2 / 3), 0.75)
    # of c nothing is known afterwards
    assert (found.won, found.lost, found.difference) == (1, 1, pytest.approx((1.0 - 0.5) / 2))
    assert found.after.solved == {1: 0.75, 2: 1.0}
    assert [new.reward_text for _, new in found.examples] == ["1.00", "0.00", "not judged"]


def test_a_version_alone_has_answers_and_no_difference(tmp_path: Path) -> None:
    found = compare(measured(tmp_path, "v00002-b", {"a": [1.0], "b": [0.0]}), None, [])
    assert (found.before, found.difference, found.interval) == (None, None, None)
    assert [(old, new.prompt) for old, new in found.examples] == [(None, "ask a"), (None, "ask b")]


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    one = measured(tmp_path, "v00001-a", {"a": [1]})
    other = measured(tmp_path, "v00002-a", {"b": [1]})
    with pytest.raises(ValueError, match="have no answered task in common"):
        compare(one, other, [])
    runs.configure(RunDirectory(str(tmp_path / "v00003-a")))
    with pytest.raises(ValueError, match="the evaluation is not done"):
        compare(str(tmp_path / "v00003-a"), None, [])


def test_a_call_is_shown_as_it_was_made_and_several_texts_by_line(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path / "r"))
    runs.configure(run)
    call = {"id": "c", "type": "function", "function": {"name": "calc", "arguments": {"expression": "1+1"}}}
    row = runs.conversation(
        [
            {"role": "user", "content": [{"type": "text", "text": text} for text in ("what", "is it")]},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ],
        group_id=None,
    )
    ref = write_trajectories(run, 0, [row], "evaluation-1", "evaluations")
    runs.commit(run, 0, "evaluate", outputs=[ref], data={"reward_mean": 0.5, "failures": {}})
    [[answer]] = answers_of(RunView.open(run.uri), 0).values()
    assert (answer.prompt, answer.text) == ("what\nis it", 'calc({"expression": "1+1"})')


@given(st.integers(1, 6).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_choices_with_a_solved_answer(numbers: tuple[int, int, int]) -> None:
    answers, solved, k = numbers
    choices = list(combinations(range(answers), k))
    share = sum(any(i < solved for i in chosen) for chosen in choices) / len(choices)
    assert pass_at(k, answers, solved) == pytest.approx(share)


def test_the_interval_covers_the_mean_about_as_often_as_it_says() -> None:
    random = np.random.default_rng(0)
    covered = [
        low <= 0.3 <= high
        for low, high in (bootstrap((random.random(100) < 0.3).astype(float)) for _ in range(200))
    ]
    assert 0.88 <= np.mean(covered) <= 0.99


def test_versions_are_read_from_names() -> None:
    assert version_of("s3://runs/r/measured/v00030-0123abcd") == 30


def test_examples_hold() -> None:
    assert doctest.testmod(comparison, extraglobs={"np": np}).failed == 0
