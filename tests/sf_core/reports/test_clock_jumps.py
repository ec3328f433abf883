"""A run in whose second iteration the clock of the machine was set back."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sf_core.cli.launch import describe_tokens
from sf_core.reports.html.figures import page_figures
from sf_core.reports.iterations import stage_time
from sf_core.reports.log_lines import describe_iteration
from sf_core.reports.run_page import RunPage
from sf_core.reports.summary import summarise
from sf_core.reports.view import RunView
from storage.run_directory import STAGES, RunDirectory
from tests.bench import runs
from tests.bench.commands import sf
from tests.bench.reports import report_runs


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(str(tmp_path / "run-1"))
    runs.configure(made, train={"iterations": 2})
    runs.commit(made, None, "start", data={"started_at": report_runs.AT})
    rows = [
        report_runs.talk(f"run-1.g{n}.0.a1", "hello", "hi", [n], started_at=9.0, finished_at=2.0)
        for n in range(2)
    ]
    report_runs.commit_iteration(made, 0, rows[:1])
    other = RunDirectory(str(tmp_path / "other" / "run-1"))
    report_runs.commit_iteration(other, 1, rows[1:])
    for number, stage in enumerate(STAGES):
        outputs = other.read_committed(1, stage).outputs
        for ref in outputs:
            Path(made.path(ref.uri)).parent.mkdir(parents=True, exist_ok=True)
            Path(other.path(ref.uri)).rename(made.path(ref.uri))
        times = {"started_at": report_runs.AT - 500 + number, "finished_at": report_runs.AT - 500}
        data = other.read_committed(1, stage).data | times
        runs.commit(made, 1, stage, outputs=outputs, data=data)
    return made


def test_an_iteration_of_unknown_length_has_no_speed(run: RunDirectory) -> None:
    iteration = RunView(run).iteration(1)
    assert (iteration.seconds, iteration.tokens_per_second) == (0.0, None)
    assert stage_time(run.read_committed(1, "publish")) == (report_runs.AT - 497, report_runs.AT - 497)
    assert RunView(run).iteration(0).tokens_per_second == 7.0


def test_no_output_has_a_negative_time_or_speed(run: RunDirectory) -> None:
    told = describe_iteration(RunView(run), 1, 2)
    assert told == "iteration 1, 2 of 2: reward 1.000, KL to the teacher 0.25"
    page = RunPage(run)
    page.update(1)
    assert [row["tokens/s"] for row in page.table] == [None, 7.0]
    figures = json.dumps([page_figures(RunView(run)), page.table])
    code, output = sf("inspect", run.uri, "--session", "run-1.g1.0.a1")
    assert code == 0, output
    for text in (figures, output):
        assert not re.search(r"(?<![\w.:-])-\d", text.replace("-1.0", "")), text


def test_the_summary_of_a_run_without_a_length_has_no_speed(run: RunDirectory) -> None:
    for stage in STAGES:
        Path(run.manifest_file(0, stage)).unlink()
        manifest = run.read_committed(1, stage)
        runs.commit(run, 0, stage, outputs=manifest.outputs, data=manifest.data)
    config = runs.configure(run, train={"iterations": 1})
    summary = summarise(RunView(run), config)
    assert (summary["seconds_rl"], summary["tokens_per_second"]) == (0, None)
    assert summary["seconds_total"] >= 0
    assert describe_tokens(summary) == "100 sampled, 70 of them in sessions that count"
