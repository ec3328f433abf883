"""Pipes, devices and links in the place of files that commands read and write."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from sf_core.cli.stack.processes import client_settings
from sf_core.dataplane.journal.journal_file import private
from storage.errors import StorageError
from storage.run_directory import RunDirectory
from tests.bench import commands, runs

TURNS = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(str(tmp_path / "runs" / "run-1"))
    runs.configure(made)
    runs.sample(made, 0, [runs.conversation(TURNS)])
    return made


def replace_by_pipe(path: str) -> str:
    os.unlink(path)
    os.mkfifo(path)
    return f"{path} is a named pipe, but must be a file: remove or rename it\n"


@pytest.mark.parametrize(
    "name", ["trajectories/iteration=0/rollout-1.parquet", "manifests/00000/rollout.json", "config.json"]
)
def test_a_pipe_in_a_run_is_refused_without_waiting(run: RunDirectory, name: str) -> None:
    told = replace_by_pipe(run.path(name))
    assert commands.check_refused(Path(run.uri), ["report", run.uri]) == told


def test_a_pipe_as_configuration_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(file := tmp_path / "run.yaml")
    told = f"{file}: cannot be read: {file} is a named pipe, but must be a file: remove or rename it\n"
    assert commands.check_refused(tmp_path, ["train", str(file)]) == told


def test_a_report_does_not_replace_a_device(run: RunDirectory) -> None:
    told = "/dev/full: the storage failed ([Errno 28] No space left on device)\n"
    assert commands.check_refused(Path(run.uri), ["report", run.uri, "--output", "/dev/full"]) == told
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


def test_a_report_is_written_through_a_link_of_the_user(run: RunDirectory, tmp_path: Path) -> None:
    (link := tmp_path / "newest.html").symlink_to(tmp_path / "published.html")
    code, output = commands.sf("report", run.uri, "--output", str(link))
    assert (code, link.is_symlink()) == (0, True), output
    assert "<html" in (tmp_path / "published.html").read_text(encoding="utf-8")


def test_a_report_in_a_run_is_not_written_through_a_link(run: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"mine")
    link = Path(run.path("report.html"))
    link.symlink_to(tmp_path / "precious")
    told = f"{link} is a link, but must be a file: remove or rename it\n"
    assert commands.check_refused(tmp_path, ["report", run.uri]) == told


def test_authorities_and_journals_are_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"mine")
    for name in ("authority.pem", "run.journal"):
        (link := tmp_path / name).symlink_to(tmp_path / "precious")
        with pytest.raises(StorageError) as refused:
            client_settings(link) if name == "authority.pem" else private(str(link), os.O_APPEND)
        assert str(refused.value) == f"{link} is a link, but must be a file: remove or rename it"
    assert (tmp_path / "precious").read_bytes() == b"mine"
