import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from sf_core.reports.outcomes.table import inspect_tasks
from sf_core.reports.tables import inspect_run, run_data
from sf_core.reports.timeline import record_devices
from sf_core.reports.view import RunView
from sf_core.scheduling.timeline import Span
from storage import files
from storage.run_directory import STAGES, RunDirectory
from storage.tables.outcomes import write_outcomes
from storage.tables.trajectories import write_trajectories
from tests.bench import runs
from tests.bench.commands import sf
from tests.bench.reports import spans

TALK = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]


def lines(view: RenderableType, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(view)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def left(run: RunDirectory, number: int, rows: list[dict[str, Any]], **told: int) -> None:
    """Commit a rollout of a run that chooses, in ten seconds in which engines sampled a million tokens."""
    at = spans.AT + 10 * number
    outputs = [
        write_trajectories(run, number, [runs.conversation(TALK, session_id=f"s{number}")], "rollout-1"),
        write_outcomes(run, number, rows, "rollout-1"),
    ]
    data = {"rejected": {}, "failures": {}, "reward_mean": 0.5, "started_at": at, "finished_at": at + 10}
    runs.commit(run, number, "rollout", outputs=outputs, data=data | told)
    spans.write_spans(
        run, Span("t0", "rollout", at, at + 9, "busy", "sample", number, f"l{number}", 1_234_567)
    )


@pytest.fixture
def curriculum_run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(str(tmp_path / "run-1"))
    stages = [{"shares": {"sums": 1}, "until": 4}, {"shares": {"sums": 1, "words": 1}}]
    curriculum = {"pool": 40, "stages": stages}
    runs.configure(
        run, rollout={"groups_per_batch": 4, "curriculum": curriculum}, environment={"name": "mixture"}
    )
    left(run, 0, [runs.group_row(0, [1, 1]), runs.group_row(1, [0, 0])], right=1, mixed=0, wrong=1)
    rows = [runs.group_row(2, [0, 1]), runs.group_row(3, [0, 0], task_index=1, task_id="sums-1")]
    left(run, 1, [*rows, runs.group_row(4, [1], task_index=None)], right=12, mixed=240, wrong=116)
    return run


def test_tasks_are_counted_by_source_with_the_hardest_and_the_easiest(curriculum_run: RunDirectory) -> None:
    told = [line.split() for line in lines(inspect_tasks(curriculum_run.uri))]
    assert told[1:4] == [
        ["source", "unseen", "right", "mixed", "wrong", "groups", "tokens"],
        ["sums", "37", "1", "1", "1", "4", "80"],
        ["words", "40", "0", "0", "0", "0", "0"],
    ]
    hard = told.index(["hardest", "tasks"])
    easy = told.index(["easiest", "tasks"])
    assert told[hard + 1] == ["task", "source", "share", "sessions", "groups", "tokens"]
    assert told[hard + 2 : hard + 4] == [
        ["sums-1", "sums", "0.00", "4", "2", "40"],
        ["sums-2", "sums", "0.50", "2", "1", "20"],
    ]
    assert told[easy + 2] == ["sums-0", "sums", "1.00", "2", "1", "20"]
    assert told[-1] == ["external", "groups,", "whose", "tasks", "are", "not", "ours:", "1"]


def test_the_table_of_tasks_fits_a_narrow_terminal_and_steers_none(curriculum_run: RunDirectory) -> None:
    nasty = {"task_id": "\x1b[2J[red]" + "x" * 90, "source": "\x1b" + "y" * 90, "tokens": [10**12]}
    left(curriculum_run, 2, [runs.group_row(9, [1.0], **nasty)])
    told = lines(inspect_tasks(curriculum_run.uri))
    assert max(map(len, told)) <= 80
    assert "\x1b" not in "".join(told) and any(line.startswith("\\x1b[2J[red]xxx") for line in told)


def test_a_run_without_a_pool_has_no_number_of_unseen_tasks(curriculum_run: RunDirectory) -> None:
    runs.configure(curriculum_run, rollout={"gate": "varied"})
    assert lines(inspect_tasks(curriculum_run.uri))[2].split() == ["sums", "1", "1", "1", "4", "80"]


def test_runs_without_outcomes_say_so(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path / "plain"))
    runs.configure(run)
    runs.sample(run, 0, [runs.conversation(TALK)])
    assert " ".join(lines(inspect_tasks(run.uri))) == (
        "run plain has no outcomes of its groups: only runs with rollout.gate, "
        "rollout.curriculum, rollout.spare_sessions or rollout.least_sessions have them"
    )
    assert "has no outcomes of its groups" in sf("inspect", run.uri, "--tasks")[1]
    # an older run with a gate, or one that has just begun
    runs.configure(run, rollout={"gate": "varied"})
    assert lines(inspect_tasks(run.uri)) == [
        "run plain: no batch with outcomes of its groups is committed yet"
    ]
    assert "right/mixed" not in "".join(lines(inspect_run(run.uri)))


def test_a_file_of_outcomes_that_is_gone_is_named(curriculum_run: RunDirectory) -> None:
    files.remove(curriculum_run.path("outcomes/iteration=1/rollout-1.parquet"))
    with pytest.raises(ValueError, match=r"outcomes/iteration=1/rollout-1\.parquet: no such file"):
        inspect_tasks(curriculum_run.uri)
    assert sf("inspect", curriculum_run.uri, "--tasks")[0] == 2


def test_iterations_show_sampled_beside_trained_tokens_and_kinds_of_groups(
    curriculum_run: RunDirectory,
) -> None:
    for stage in STAGES[1:]:
        times = {"started_at": spans.AT + 10, "finished_at": spans.AT + 10}
        runs.commit(curriculum_run, 0, stage, data=times | ({"lags": [1]} if stage == "filter" else {}))
    record_devices(RunView(curriculum_run), 0, is_over=True)
    told = lines(inspect_run(curriculum_run.uri))
    assert max(map(len, told[:6])) <= 80
    assert told[1].split() == ["iter-", "held-", "lag", "lag", "tokens", "tokens", "right/mixed"]
    assert told[3].split() == ["0", "0.500", "0.00", "0", "1.23M", "1", "1", "0", "1/0/1", *"RFTP"]
    assert told[4].split() == ["1", "0.500", "1.00", "1", "1", "1", "0", "12/240/116", *"R..."]
    assert f"their tasks: sf inspect {curriculum_run.uri} --tasks" in " ".join(told)
    first, second = run_data(curriculum_run.uri)["iterations"]
    assert (first["tokens_of_engines"], second["tokens_of_engines"]) == (1_234_567, None)
    assert second["groups"] == {"right": 12, "mixed": 240, "wrong": 116}
