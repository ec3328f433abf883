import logging
from pathlib import Path

import pytest

from sf_core.reports.log_lines import describe_iteration, find_unlogged, log_progress
from sf_core.reports.view import RunView
from storage.run_directory import STAGES, RunDirectory
from tests.bench.runs import commit, configure

FAILED = {
    "failures": {"timeout": 2},
    "discarded": {"agent_error": 5},
    "last_error": "my_agent.py:12: agent raised KeyError: x",
}


@pytest.mark.parametrize(
    ("newest_first", "numbers"),
    [
        (["iteration 3, 4 of 9: reward 0.5", "iteration 2, 3 of 9: reward 0.4"], [4, 5]),
        (["iteration 3: 2 sessions failed", "iteration 5, 6 of 9: reward 0.5"], []),
        (["attempt 2 continues with iteration 6, 7 of 9"], [5]),
    ],
)
def test_the_iterations_before_another_attempt_that_the_log_does_not_tell_are_found(
    newest_first: list[str], numbers: list[int]
) -> None:
    assert [*find_unlogged(newest_first, 6)] == numbers
    assert not find_unlogged([], 0)


def test_a_line_of_an_iteration_has_its_reward_evaluation_speed_and_time(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path / "r"))
    configure(run)
    for number in range(3):
        start = 100.0 + 5 * number
        times = {"started_at": start, "finished_at": start + 5}
        for stage in STAGES[1:]:
            commit(run, number, stage, data=times)
        told = {"sessions": 8, "failures": {}, "reward_mean": number / 4, "sampled_tokens": 5000}
        commit(run, number, "rollout", data=times | told | (FAILED if number == 1 else {}))
    commit(run, 2, "evaluate", data={"reward_mean": 0.75, "sampled_tokens": 5000})
    first = "iteration 0, 1 of 40: reward 0.000, 1,000 tokens/s, 5.0 s"
    assert describe_iteration(RunView(run), 0, 40) == first
    second = (
        "iteration 1, 2 of 40: reward 0.250, 1,000 tokens/s, 5.0 s; 2 of 8 sessions failed: timeout 2; "
        "5 failed sessions discarded: agent_error 5; last error: my_agent.py:12: agent raised KeyError: x"
    )
    assert describe_iteration(RunView(run), 1, 40) == second
    third = "iteration 2, 3 of 40: reward 0.500, held-out 0.750 before the iteration, 2,000 tokens/s, 5.0 s"
    assert describe_iteration(RunView(run), 2, 40) == third
    times = {"started_at": 115.0, "finished_at": 120.0, "teacher_kl": 0.0625}
    for stage in STAGES:
        commit(run, 3, stage, data=(told | times) if stage == "rollout" else times)
    taught = "iteration 3, 4 of 40: reward 0.500, KL to the teacher 0.0625, 1,000 tokens/s, 5.0 s"
    assert describe_iteration(RunView(run), 3, 40) == taught


def test_progress_is_logged_whatever_the_level_of_others(caplog: pytest.LogCaptureFixture) -> None:
    assert logging.getLogger().getEffectiveLevel() >= logging.WARNING
    log_progress("iteration 0: 100% of it")
    assert [record.getMessage() for record in caplog.records] == ["iteration 0: 100% of it"]
