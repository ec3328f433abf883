"""The figures of runs that are compared, and the settings that differ."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sf_core.config import RunConfig
from sf_core.reports.html.comparison import differing_settings, name_runs, run_figures
from sf_core.reports.view import RunView
from storage.run_directory import RunDirectory
from storage.tables.trajectories import write_trajectories
from tests.bench.reports.report_runs import talk
from tests.bench.runs import commit


def differing(*sections: dict[str, Any]) -> dict[str, list[str]]:
    found = differing_settings([RunConfig.model_validate(given) for given in sections])
    return {row["key"]: row["values"] for row in found}


def test_a_curve_has_its_place_on_every_axis(two_runs: list[RunDirectory]) -> None:
    figures = run_figures(RunView.open(two_runs[0].uri), "slow")
    assert figures["reached"] == [
        {"iterations": 1, "seconds": 10, "tokens": 70},
        {"iterations": 2, "seconds": 20, "tokens": 140},
    ]
    assert [row["reward"] for row in figures["rows"]] == [0.25, 0.5]
    assert [(row["entropy"], row["lag"], row["tokens_per_second"]) for row in figures["rows"]] == [
        (1.5, 0, 7)
    ] * 2
    assert figures["held_out"] == [(0, 0.25), (2, 0.5)]
    assert (figures["best"], figures["failed"], figures["due"]) == (
        {"version": 2, "reward": 0.5, "error": None},
        1,
        2,
    )


def test_a_held_out_reward_has_its_standard_error_over_tasks(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path / "x"))
    run.write_config(RunConfig(run_id="x"))
    # two answers to each of three tasks
    rewards = [(0.0, 1.0), (1.0, 1.0), (0.25, 0.25)]
    rows = [
        talk(f"x.e{task}.{i}", "hello", "hi", [0], reward=reward, task_id=f"t{task}")
        for task, pair in enumerate(rewards)
        for i, reward in enumerate(pair)
    ]
    ref = write_trajectories(run, 0, rows, "part", "evaluations")
    # no session of a fourth task gave an answer
    commit(run, 0, "evaluate", data={"reward_mean": 0.5, "num_tasks": 4}, outputs=[ref])
    best = run_figures(RunView.open(run.uri), "x")["best"]
    assert best["error"] == pytest.approx(np.std([0.5, 1.0, 0.25, 0.0], ddof=1) / 2)


def test_only_settings_that_differ_are_listed_with_defaults_filled_in() -> None:
    assert differing({"run_id": "a"}, {"run_id": "b"}) == {}
    assert differing({"seed": 1}, {}, {"train": {"minibatches": 2}}) == {
        "seed": ["1", "0", "0"],
        "train.minibatches": ["1", "1", "2"],
    }


def test_of_another_kind_or_an_absent_section_the_whole_is_shown() -> None:
    policy = differing({}, {"train": {"loss": {"policy": {"kind": "cispo", "high": 0.5}}}})
    assert policy["train.loss.policy"][1] == '{"kind": "cispo", "high": 0.5}'
    teachers = differing({}, {"train": {"teacher": {"model": "/a"}}}, {"train": {"teacher": {"model": "/b"}}})
    assert [*teachers] == ["train.teacher"]
    assert teachers["train.teacher"][0] == "null"


def test_a_long_value_is_cut() -> None:
    found = differing({}, {"environment": {"settings": {"text": "x" * 1000}}})
    assert len(found["environment.settings"][1]) < 100


def test_long_values_are_cut_so_that_their_difference_is_seen() -> None:
    environments = [{"environment": {"settings": {"text": "x" * 500, "size": size}}} for size in (1, 2)]
    one, other = differing(*environments)["environment.settings"]
    assert one.endswith('"size": 1}') and other.endswith('"size": 2}')
    assert one.startswith("... xxx") and len(one) < 100


@pytest.mark.parametrize(
    ("uris", "names"),
    [
        (["runs/a", "runs/b"], ["a", "b"]),
        (["/x/runs/a", "/y/runs/a", "/x/runs/b"], ["x/runs/a", "y/runs/a", "x/runs/b"]),
        (["s3://one/a", "s3://two/a"], ["one/a", "two/a"]),
    ],
)
def test_runs_of_one_name_are_told_apart(uris: list[str], names: list[str]) -> None:
    assert name_runs(uris) == names
