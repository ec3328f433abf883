"""Greedy answers for the table at the end of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from sf_core.cli.serving import policy
from sf_core.cli.serving.greedy_process import store_greedy_answers
from sf_core.cli.serving.policy import ask_greedily, has_greedy_answers
from sf_core.config import RunConfig
from sf_core.environments.registry import draw_tasks
from sf_core.reports.evaluations.comparison import read_greedy
from storage.run_directory import RunDirectory
from tests.bench.policy_server import publish_run
from tests.bench.waits import patience


def held_out(run: RunDirectory) -> list[str]:
    """Ids of the first held-out tasks of a run."""
    environment = run.read_config(RunConfig).environment
    return [task.task_id for task in draw_tasks(environment, "holdout", range(3))]


def test_greedy_answers_are_the_same_whatever_the_seed_is(tmp_path: Path) -> None:
    run = publish_run(tmp_path)
    store_greedy_answers(run, 3, held_out(run))
    answers = read_greedy(run, 3)
    assert [*answers] == held_out(run)
    assert all(answer.text and answer.reward is not None for answer in answers.values())
    run.write_config(run.read_config(RunConfig).model_copy(update={"seed": 7}))
    store_greedy_answers(run, 3, [*answers])
    assert read_greedy(run, 3) == answers


@pytest.mark.system
def test_another_process_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "LONGEST_S", patience())
    run = publish_run(tmp_path)
    assert ask_greedily(run, 3, held_out(run)) == ""
    assert [*read_greedy(run, 3)] == held_out(run)


def test_where_no_answer_is_had_the_run_is_shown_without(tmp_path: Path) -> None:
    run = publish_run(tmp_path)
    assert ask_greedily(run, 1, ["any"]) == "a session failed"
    assert read_greedy(run, 1) == {}


def test_greedy_answers_that_take_long_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "LONGEST_S", 0.01)
    assert ask_greedily(publish_run(tmp_path), 3, ["any"]) == "they took longer than 0 s"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, True),
        ({"rollout": {"temperature": 0}}, False),
        ({"cluster": {"scheduler": "tcp://127.0.0.1:8786"}}, False),
        ({"engine": {"kind": "vllm"}}, False),
        ({"environment": {"judges": {"one": {"url": "http://127.0.0.1:1"}}}}, False),
    ],
)
def test_only_the_builtin_engine_on_this_machine_is_asked(
    settings: dict[str, object], expected: bool
) -> None:
    assert has_greedy_answers(RunConfig.model_validate(settings)) == expected
