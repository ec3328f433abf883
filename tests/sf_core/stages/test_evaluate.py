"""`sf evaluate` before it starts anything: what it would measure, and what it refuses."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from sf_core.cli.stack.local import free_port
from sf_core.config import RunConfig
from sf_core.config.validation import validate_config
from sf_core.reports import states
from sf_core.stages.evaluate import Evaluation, open_evaluation
from sf_core.stages.preflight.stored_config import read_stored_config
from storage.run_directory import Attempt, RunDirectory
from tests.bench import runs
from tests.bench.commands import sf
from tests.bench.reports.cleanup import served

MEASURED = {"reward_mean": 0.75, "num_tasks": 64, "sessions": 63, "by_environment": {"spell": 0.75}}


@pytest.fixture
def halfway_run(tmp_path: Path) -> RunDirectory:
    """A run with two of four iterations done, whose newest version is not evaluated."""
    run = RunDirectory(str(tmp_path / "runs" / "r"))
    runs.configure(run, train={"iterations": 4}, evaluate={"num_tasks": 64})
    runs.pretend(run, 2, finished=False)
    runs.commit(run, 0, "evaluate", data=MEASURED)
    return run


def evaluation(run: RunDirectory, **sections: Any) -> Evaluation:
    root = run.uri.rsplit("/", 1)[0]
    return open_evaluation(validate_config({"run_id": "r", "storage": {"root": root}} | sections))


def test_the_newest_version_is_measured_as_the_run_was_configured(halfway_run: RunDirectory) -> None:
    found = evaluation(halfway_run)
    assert (found.version, found.measured) == (2, None)
    assert found.config == read_stored_config(halfway_run.uri)
    assert evaluation(halfway_run, evaluate={"num_tasks": 1000}).config.evaluate.num_tasks == 1000


def test_a_version_that_was_measured_is_shown_without_starting_anything(halfway_run: RunDirectory) -> None:
    runs.commit(halfway_run, 2, "evaluate", data=MEASURED)
    before = RunDirectory(halfway_run.uri).read_config(RunConfig)
    line = "held-out reward of version 2: 0.750 (spell 0.750) over 63 sessions, measured before"
    assert sf("evaluate", halfway_run.uri) == (0, line)
    assert RunDirectory(halfway_run.uri).read_config(RunConfig) == before
    assert halfway_run.begin_attempt() == 1


def test_a_version_is_not_measured_over_another_number_of_tasks(halfway_run: RunDirectory) -> None:
    runs.commit(halfway_run, 2, "evaluate", data=MEASURED)
    code, output = sf("evaluate", halfway_run.uri, "--set", "evaluate.num_tasks=1000")
    assert (code, "on 64 tasks, not 1000; leave evaluate.num_tasks out" in output) == (1, True)


def test_a_run_that_is_being_trained_is_refused_and_an_evaluation_that_died_goes_on(
    halfway_run: RunDirectory, tmp_path: Path
) -> None:
    with served(tmp_path / "runs", "r") as (url, _):
        halfway_run.begin_attempt(Attempt(dataplane=url))
        with pytest.raises(ValueError, match="r: the run is in use; stop it or wait until it ends"):
            evaluation(halfway_run)
        halfway_run.begin_attempt(Attempt(dataplane=url, evaluate_only=True))
        assert evaluation(halfway_run).version == 2


def test_a_data_plane_that_is_starting_again_is_awaited(
    halfway_run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "LOOK_S", 0.01)
    port = free_port()
    halfway_run.begin_attempt(Attempt(dataplane=f"http://127.0.0.1:{port}"))
    config = validate_config({"run_id": "r", "storage": {"root": str(tmp_path / "runs")}})
    with ExitStack() as stack:

        def start(line: str) -> None:
            assert line.startswith(
                "r: the data plane does not answer and may be restarting; waiting for 20 s"
            )
            stack.enter_context(served(tmp_path / "runs", "r", port=port))

        with pytest.raises(ValueError, match="r: the run is in use"):
            open_evaluation(config, start)


def test_a_command_has_waited_for_the_flow_that_it_starts(
    halfway_run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    halfway_run.begin_attempt(Attempt(dataplane="http://127.0.0.1:1"))
    monkeypatch.setenv("SF_STARTED_AT", "1")
    assert evaluation(halfway_run).version == 2


def test_a_run_without_a_policy_cannot_be_measured(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path / "r"))
    runs.configure(run)
    with pytest.raises(
        ValueError, match="r: the run has no policy to evaluate yet; continue the run with `sf resume "
    ):
        evaluation(run)
    runs.commit(run, None, "start")
    assert evaluation(run).version == 0


def test_a_form_must_name_the_run() -> None:
    with pytest.raises(ValueError, match="run_id: name the run to evaluate"):
        open_evaluation(RunConfig())
