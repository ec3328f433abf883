import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from storage.scratch import scratch_folder

HOLD = """
import sys
from storage.scratch import scratch_folder
folder = scratch_folder()
print(folder.name, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


def age(folder: str) -> None:
    os.utime(folder, (time.time() - 3600,) * 2)


def test_a_folder_goes_with_its_last_user() -> None:
    with scratch_folder() as name:
        assert Path(name).stat().st_mode & 0o077 == 0, "others could reach the socket of a vLLM server"
        assert Path(name).is_dir()
    assert not Path(name).exists()


def test_what_a_killed_process_left_goes_when_the_next_folder_is_made_and_what_others_hold_stays() -> None:
    command = [sys.executable, "-c", HOLD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8") as other:
        assert other.stdout is not None
        name = other.stdout.readline().strip()
        age(name)
        scratch_folder()
        assert Path(name).is_dir()
        other.kill()
        other.wait()
    scratch_folder()
    assert not Path(name).exists()


def test_a_folder_that_was_just_made_is_left_alone(tmp_path: Path) -> None:
    young = tmp_path / "sf-scratch-a"
    foreign = tmp_path / "sf-other"
    for folder in (young, foreign):
        folder.mkdir()
    age(str(foreign))
    scratch_folder()
    assert young.is_dir() and foreign.is_dir()
    age(str(young))
    scratch_folder()
    assert not young.exists()
