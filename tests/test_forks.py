"""Tests of processes that are forked from a template."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.bench.forks import Fork, run_fork, running

PROGRAM = """
import os, signal, sys, threading
word = sys.argv[1]
if word == "says":
    print(sys.argv[1:], os.getcwd(), os.environ["MARK"], "NONE" in os.environ, __name__)
    print(signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL, threading.active_count(), file=sys.stderr)
elif word == "raises":
    raise ValueError("so")
elif word == "exits":
    sys.exit(3)
else:
    signal.pause()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "forked_program.py").write_text(PROGRAM, encoding="utf-8")
    monkeypatch.delenv("NONE", raising=False)
    return tmp_path


def test_a_fork_has_its_own_arguments_folder_environment_and_streams(folder: Path) -> None:
    done = run_fork((), "forked_program", "says", "it", folder=folder, variables={"MARK": "m"})
    assert (done.returncode, done.stdout) == (0, f"['says', 'it'] {folder} m False __main__\n")
    assert done.stderr == "True 1\n"


def test_a_fork_ends_as_any_process_of_python(folder: Path) -> None:
    assert run_fork((), "forked_program", "exits", folder=folder).returncode == 3
    raised = run_fork((), "forked_program", "raises", folder=folder)
    assert raised.returncode == 1 and raised.stderr.endswith("ValueError: so\n")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_fork_is_killed_by_signals(folder: Path, number: signal.Signals) -> None:
    with Fork((), "forked_program", "waits", folder=folder) as fork:
        assert running("waits") == [fork] and fork.pid != os.getpid()
        with pytest.raises(subprocess.TimeoutExpired):
            fork.wait(0.01)
        fork.send_signal(number)
    assert (fork.poll(), running("waits")) == (-number, [])
    assert not psutil.pid_exists(fork.pid)
