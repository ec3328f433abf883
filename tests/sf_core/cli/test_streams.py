"""The end of a command whose output nobody reads, or cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.waits import patience

PRINTS = """
import sys, threading
from sf_core.cli.terminal import command_streams
from sf_core.cli.terminal import console, errors

with command_streams():
    kind = sys.argv[1]
    if kind == "plain":
        print("a line")
    elif kind == "rich":
        console.print("a line")
    elif kind == "error":
        errors.print("a line")
    elif kind == "thread":
        thread = threading.Thread(target=console.print, args=["a line"])
        thread.start()
        thread.join()
    else:
        raise RuntimeError("\\x1b[2J")
    sys.exit(0)
"""


def run(kind: str, redirected: str) -> tuple[int, str]:
    """Exit code, and what the streams that are read got."""
    command = [sys.executable, "-c", PRINTS, kind]
    done = subprocess.run(
        ["bash", "-c", f'"$@" {redirected}', "bash", *command],
        capture_output=True,
        encoding="utf-8",
        timeout=patience(),
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("kind", ["plain", "rich", "thread"])
def test_a_command_ends_quietly_once_nobody_reads_its_output(kind: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-c", PRINTS, kind]
    with open(writing, "wb") as unread:
        done = subprocess.run(
            command, stdout=unread, stderr=subprocess.PIPE, encoding="utf-8", timeout=patience()
        )
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("kind", ["plain", "rich"])
def test_output_that_cannot_be_written_is_one_sentence(kind: str) -> None:
    told = "error: the output of the command cannot be written: No space left on device\n"
    assert run(kind, ">/dev/full") == (1, told)


def test_errors_that_cannot_be_written_do_not_end_a_command() -> None:
    assert run("error", "2>/dev/full") == (0, "")
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as unread:
        done = subprocess.run([sys.executable, "-c", PRINTS, "error"], stderr=unread, timeout=patience())
    assert done.returncode == 0


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&- <&-"])
def test_a_closed_stream_is_no_stream_of_another_file(closed: str) -> None:
    assert run("rich", closed) == (0, "")


def test_a_defect_shows_its_traceback_without_steering_the_terminal() -> None:
    code, output = run("defect", "")
    assert code == 1 and output.endswith("RuntimeError: \\x1b[2J\n") and "\x1b" not in output


def test_sf_ends_quietly_under_head(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "sf_core", "settings", "--schema"]
    with open(writing, "wb") as unread:
        done = subprocess.run(command, stdout=unread, stderr=subprocess.PIPE, encoding="utf-8", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (141, "")
