"""What a run tells of itself when it learns nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sf_core.config import RunConfig, TrainConfig
from sf_core.reports.concerns import concerns_of, failures_line, sum_run_concerns
from sf_core.reports.series import RunSeries
from sf_core.reports.view import RunView
from storage.run_directory import RunDirectory
from tests.bench.runs import commit, configure

GOOD: dict[str, dict[str, Any]] = {
    "rollout": {
        "sessions": 8,
        "failures": {},
        "answers": 10,
        "cut_answers": 4,
        "reward_min": 0.0,
        "reward_max": 1.0,
    },
    "filter": {"zero_advantage_share": 0.5},
    "train": {"grad_norm": 0.1},
    "publish": {},
}


def run_of(folder: Path, *iterations: dict[str, dict[str, Any]]) -> tuple[RunView, RunConfig]:
    run = RunDirectory(str(folder / "r"))
    config = configure(run, environment={"reward": "my_agent:reward"}, rollout={"max_tokens": 64})
    for number, changes in enumerate(iterations):
        for stage, data in GOOD.items():
            commit(run, number, stage, data=data | changes.get(stage, {}))
    return RunView(run), config


@pytest.mark.parametrize(
    ("changes", "kind", "sentence"),
    [
        ({"filter": {"zero_advantage_share": 1.0}}, "equal", "nothing was learned: my_agent:reward does not"),
        ({"train": {"grad_norm": 0.0}}, "gradient", "the gradient was zero"),
        (
            {"rollout": {"cut_answers": 9}},
            "cut",
            "90% of the answers were cut off by rollout.max_tokens (64)",
        ),
    ],
)
def test_an_iteration_in_which_nothing_or_little_can_be_learned_says_why(
    tmp_path: Path, changes: dict[str, Any], kind: str, sentence: str
) -> None:
    view, config = run_of(tmp_path, {}, changes)
    assert concerns_of(view, 0, config) == {}
    told = concerns_of(view, 1, config)
    assert list(told) == [kind] and sentence in told[kind]
    [summed] = sum_run_concerns(RunSeries(view))
    assert summed == f"{told[kind]} (1 of 2 iterations)"


def test_equal_rewards_explain_a_gradient_of_zero(tmp_path: Path) -> None:
    changes = {"filter": {"zero_advantage_share": 1.0}, "train": {"grad_norm": 0.0}}
    view, config = run_of(tmp_path, changes)
    assert list(concerns_of(view, 0, config)) == ["equal"]


def test_a_reward_that_is_the_same_in_three_batches_is_told(tmp_path: Path) -> None:
    same = {"rollout": {"reward_min": 0.5, "reward_max": 0.5}}
    view, config = run_of(tmp_path, {}, same, same, same, {})
    assert [list(concerns_of(view, number, config)) for number in range(5)] == [[], [], [], ["constant"], []]
    assert (
        "earned 0.5: check that my_agent:reward is not constant" in concerns_of(view, 3, config)["constant"]
    )
    taught = TrainConfig.model_validate({"advantage": "none", "teacher": {"model": "teacher"}})
    assert not concerns_of(view, 3, config.model_copy(update={"train": taught}))


def test_no_advantage_is_no_concern_where_a_teacher_alone_teaches(tmp_path: Path) -> None:
    view, config = run_of(tmp_path, {"filter": {"zero_advantage_share": 1.0}})
    taught = TrainConfig.model_validate({"advantage": "none", "teacher": {"model": "teacher"}})
    assert not concerns_of(view, 0, config.model_copy(update={"train": taught}))


def test_a_run_of_an_earlier_version_whose_manifests_have_less_has_no_concerns(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path / "r"))
    config = configure(run)
    for stage in GOOD:
        commit(run, 0, stage, data={"failures": {}} if stage == "rollout" else {})
    view = RunView(run)
    assert concerns_of(view, 0, config) == {} and failures_line(view.iteration(0)) == ""
