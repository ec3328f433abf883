"""What a run tells of itself when it learns nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sf_core.config import RunConfig, TrainConfig
from sf_core.reports.view import RunView
from sf_core.reports.warnings import failures_line, iteration_warnings, run_warnings
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
    assert iteration_warnings(view, 0, config) == {}
    told = iteration_warnings(view, 1, config)
    assert list(told) == [kind] and sentence in told[kind]
    [summed] = run_warnings(view)
    assert summed == f"{told[kind]} (1 of 2 iterations)"


def spent(cpu_s: float, busy_s: float, num_ended: int = 100) -> dict[str, float]:
    return {"cpu_s": cpu_s, "busy_s": busy_s, "num_ended": num_ended}


@pytest.mark.parametrize(
    ("free", "runners", "told"),
    [
        (0.8, {"a0:l1": spent(2.4, 9.0)}, "24 ms on a0"),
        (0.8, {"a0:l1": spent(2.4, 9.0), "a1:l2": spent(1.0, 1.0)}, "24 ms on a0"),
        (0.8, {"a0:l1": spent(2.4, 3.0), "a0:l2": spent(3.6, 3.0)}, "30 ms on a0"),
        # the code of the agents runs in threads, or in programs
        (0.8, {"a0:l1": spent(6.0, 0.1), "a1:l2": spent(12.0, 0.1)}, "60 ms on a0, 120 ms on a1"),
        # the agents wait for something else than a core
        (0.8, {"a0:l1": spent(2.4, 3.0)}, None),
        # the engines have requests
        (0.3, {"a0:l1": spent(9.0, 9.0)}, None),
        (None, {"a0:l1": spent(9.0, 9.0)}, None),
    ],
)
def test_a_run_that_waits_for_the_code_of_its_agents_says_so(
    tmp_path: Path, free: float | None, runners: dict[str, Any], told: str | None
) -> None:
    facts = {"engines_free": free, "runners_seconds": 10.0, "runners": runners}
    view, config = run_of(tmp_path, {"rollout": facts})
    sentence = (
        "the engines had no request for 80% of the time, because the code of the agents computed (CPU time "
        f"per session: {told}): use endpoint.client() instead of a new client in each session, look for what "
        "else each session loads, or add workers tagged agent"
    )
    assert iteration_warnings(view, 0, config) == ({} if told is None else {"agents": sentence})


def test_cpu_time_of_agents_is_summed_by_worker(tmp_path: Path) -> None:
    first = {"a0:l1": spent(1.0, 2.0, 10), "a1:l2": spent(0.5, 2.0, 0)}
    view, _ = run_of(tmp_path, {"rollout": {"runners": first}}, {"rollout": {"runners": first}}, {})
    assert view.runners == {
        "a0": {"sessions": 20, "cpu_s": 2.0, "cpu_s_per_session": 0.1},
        "a1": {"sessions": 0, "cpu_s": 1.0, "cpu_s_per_session": 1.0},
    }


def test_equal_rewards_explain_a_gradient_of_zero(tmp_path: Path) -> None:
    changes = {"filter": {"zero_advantage_share": 1.0}, "train": {"grad_norm": 0.0}}
    view, config = run_of(tmp_path, changes)
    assert list(iteration_warnings(view, 0, config)) == ["equal"]


def test_a_reward_that_is_the_same_in_three_batches_is_told(tmp_path: Path) -> None:
    same = {"rollout": {"reward_min": 0.5, "reward_max": 0.5}}
    view, config = run_of(tmp_path, {}, same, same, same, {})
    assert [list(iteration_warnings(view, number, config)) for number in range(5)] == [
        [],
        [],
        [],
        ["constant"],
        [],
    ]
    assert (
        "earned 0.5: check that my_agent:reward is not constant"
        in iteration_warnings(view, 3, config)["constant"]
    )
    taught = TrainConfig.model_validate({"advantage": "none", "teacher": {"model": "teacher"}})
    assert not iteration_warnings(view, 3, config.model_copy(update={"train": taught}))


def test_no_advantage_is_no_warning_where_a_teacher_alone_teaches(tmp_path: Path) -> None:
    view, config = run_of(tmp_path, {"filter": {"zero_advantage_share": 1.0}})
    taught = TrainConfig.model_validate({"advantage": "none", "teacher": {"model": "teacher"}})
    assert not iteration_warnings(view, 0, config.model_copy(update={"train": taught}))


def test_a_run_of_an_earlier_version_whose_manifests_have_less_has_no_warnings(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path / "r"))
    config = configure(run)
    for stage in GOOD:
        commit(run, 0, stage, data={"failures": {}} if stage == "rollout" else {})
    view = RunView(run)
    assert iteration_warnings(view, 0, config) == {} and failures_line(view.iteration(0)) == ""
