"""`sf sweep` beside another command that works on the same sweep."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from sf_core.cli.sweeps.launch import SweepError, launch_sweep
from sf_core.sweeps.expansion import expand
from sf_core.sweeps.sweep import OpenSweep, SweepFolder
from storage.locks import FileLock


def test_a_sweep_that_another_command_runs_is_refused(tmp_path: Path) -> None:
    folder = SweepFolder(str(tmp_path), "first")
    opened = OpenSweep(folder, folder.put(expand(["quickstart"], [], 2, "first")))
    with FileLock(Path(folder.uri, "command.lock")) as lock:
        lock.tell()
        with pytest.raises(SweepError) as refused:
            launch_sweep(opened, None, Console())
    told = str(refused.value)
    assert told.startswith("sweep first is in use by another command, ")
    assert told.endswith(
        ": wait until that command ends, or stop that command with Ctrl-C, and run this command again; to "
        "begin another sweep, add --name NAME"
    )
    assert not Path(folder.uri, "logs").exists()
