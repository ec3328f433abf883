"""Folders of the user that have the names of our packages, and other copies of ours."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from sf_core.process.import_path import NAMES, ROOT, module_environment, user_folders
from sf_core.settings import load_object
from tests.bench.namesakes import make_namesakes
from tests.bench.waits import patience

SF = str(Path(sys.executable).with_name("sf"))


def call(
    folder: Path, command: list[str], environment: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, timeout=patience(), encoding="utf-8"
    )


IMPORT = """
import sys
from importlib import import_module
from sf_core.process.import_path import import_from, user_folders

import_from(user_folders())
for name in sys.argv[1:]:
    print(import_module(name).__file__)
"""


def test_a_folder_with_our_names_hides_no_package_of_ours_and_its_other_modules_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_namesakes(tmp_path / "here")
    make_namesakes(tmp_path / "code", "tasks", "storage")
    for file in ("here/mine.py", "code/yours.py"):
        (tmp_path / file).write_text("", encoding="utf-8")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), "", str(tmp_path / "code")]))
    environment = module_environment()
    assert environment["PYTHONPATH"] == str(ROOT)
    command = [sys.executable, "-P", "-c", IMPORT, *NAMES, "mine", "yours"]
    found = call(tmp_path, command, environment)
    ours = [str(ROOT / name / "__init__.py") for name in NAMES]
    users = [str(tmp_path / "here" / "mine.py"), str(tmp_path / "code" / "yours.py")]
    assert found.stdout.splitlines() == [*ours, *users], found.stderr


def test_a_process_of_a_process_finds_the_same_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = {name: module_environment()[name] for name in ("PYTHONPATH", "SF_MODULES")}
    for name, value in first.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "later").mkdir()
    monkeypatch.chdir(tmp_path / "later")
    assert module_environment().items() >= first.items()
    assert user_folders()[0] == str(tmp_path)


def test_the_copy_that_python_runs_from_the_current_folder_is_that_of_its_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert module_environment()["PYTHONPATH"] == str(ROOT)


def test_a_command_says_that_it_does_not_run_the_copy_of_its_folder(tmp_path: Path) -> None:
    make_namesakes(tmp_path)
    done = call(tmp_path, [SF, "train", "missing.yaml"])
    note = f"note: this folder has a copy of SeamlessFlow, but {ROOT} runs\n"
    assert done.stderr.startswith(f"{note}error: missing.yaml"), done.stderr
    assert call(tmp_path, [SF, "settings", "train.iterations"]).stderr == ""


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("tasks:make", "tasks:make: module tasks has no make"),
        (
            "tasks.mine:make",
            "tasks.mine:make: cannot import tasks.mine: ModuleNotFoundError: ",
        ),
    ],
)
def test_a_reference_to_a_module_that_has_our_name_is_refused(reference: str, expected: str) -> None:
    with pytest.raises(ValueError) as refused:
        load_object(reference)
    assert str(refused.value).startswith(expected)
    assert str(refused.value).endswith("; tasks is a package of SeamlessFlow: give yours another name")
