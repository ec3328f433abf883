"""What benchmarks/real_model.py counts of a command: all processes below it, until it has ended."""

import sys

import pytest

from benchmarks.real_model import watched

WORKER = "x = bytearray(200_000_000); import time; time.sleep(3)"
COMMAND = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {WORKER!r}]).returncode)"


def test_a_command_is_watched_to_its_end():
    with watched([sys.executable, "-c", COMMAND]) as (_, usage):
        pass
    assert usage.peak_gb > 0.2 and len(usage.cpu_s) == 2 and usage.seconds > 0


def test_a_command_that_fails_ends_the_benchmark():
    with pytest.raises(SystemExit, match="failed with 3"), watched([sys.executable, "-c", "exit(3)"]):
        pass
