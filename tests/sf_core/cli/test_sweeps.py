"""`sf sweep` beside another command that works on the same sweep."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from sf_core.cli.stack.local import free_port
from sf_core.cli.sweeps.launch import SweepError, launch_sweep
from sf_core.stages.sweeps.expansion import expand
from sf_core.stages.sweeps.sweep import OpenSweep, SweepFolder
from storage.local import FileLock


def test_a_sweep_that_another_command_runs_is_refused(tmp_path: Path) -> None:
    folder = SweepFolder(str(tmp_path), "first")
    opened = OpenSweep(folder, folder.put(expand(["quickstart"], [], 2, "first")))
    with FileLock(Path(folder.uri, "command.lock")) as lock:
        lock.record()
        with pytest.raises(SweepError) as refused:
            launch_sweep(opened, None, Console())
    told = str(refused.value)
    assert told.startswith("sweep first is in use by another command, ")
    assert told.endswith(
        ": wait until that command ends, or stop that command with Ctrl-C, and run this command again; to "
        "begin another sweep, add --name NAME"
    )
    assert not Path(folder.uri, "logs").exists()


def test_a_sweep_whose_prefect_server_does_not_answer_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = f"http://127.0.0.1:{free_port()}/api"
    monkeypatch.setenv("PREFECT_API_URL", api)
    folder = SweepFolder(str(tmp_path), "first")
    opened = OpenSweep(folder, folder.put(expand(["quickstart"], [], 2, "first")))
    with pytest.raises(SweepError) as refused:
        launch_sweep(opened, None, Console())
    told = str(refused.value)
    assert told.startswith(f"PREFECT_API_URL names {api}, but nothing answers there (")
    assert told.endswith("): start that Prefect server, or unset PREFECT_API_URL")
    assert not Path(folder.uri, "logs").exists()
