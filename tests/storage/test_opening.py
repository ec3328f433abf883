"""Links, pipes, devices and folders in the place of a file."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from storage import files, local
from storage.errors import StorageError
from storage.local import FileLock, find_holder, open_given, open_own
from storage.tables.parquet import read_table
from tests.bench.waits import patience

READERS: list[Callable[[str], object]] = [
    files.read_bytes,
    files.read_if_there,
    files.describe,
    read_table,
    open_given,
    lambda uri: files.local_copy(uri).__enter__(),
    lambda uri: files.open_read(uri).__enter__(),
]


def place(path: Path, kind: str) -> str:
    if kind == "a named pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    return str(path)


@pytest.mark.parametrize("kind", ["a named pipe", "a folder", "a device"])
def test_what_is_read_is_a_file_and_nothing_waits_for_a_pipe(tmp_path: Path, kind: str) -> None:
    path = place(tmp_path / "in-the-way", kind)
    for read in READERS:
        with pytest.raises(StorageError) as refused:
            read(path)
        assert str(refused.value) == f"{path} is {kind}, but must be a file: remove or rename it"


def test_a_link_to_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"read")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert files.read_bytes(str(tmp_path / "link")) == b"read"


@pytest.mark.parametrize("leads_to", ["file", "nowhere"])
def test_a_link_in_the_place_of_a_file_is_not_written_through(tmp_path: Path, leads_to: str) -> None:
    (tmp_path / "file").write_bytes(b"of another")
    (link := tmp_path / "link").symlink_to(tmp_path / leads_to)
    told = f"{link} is a link, but must be a file: remove or rename it"
    with pytest.raises(StorageError) as refused:
        files.write_atomic(str(link), b"new")
    assert str(refused.value) == told
    with pytest.raises(StorageError) as refused:
        open_own(link, os.O_WRONLY | os.O_CREAT)
    assert str(refused.value) == told
    assert link.is_symlink() and (tmp_path / "file").read_bytes() == b"of another"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


def test_a_link_of_the_user_is_followed_to_its_file(tmp_path: Path) -> None:
    (tmp_path / "page").symlink_to(tmp_path / "published.html")
    files.write_atomic(files.follow(str(tmp_path / "page")), b"new")
    assert (tmp_path / "page").is_symlink() and (tmp_path / "published.html").read_bytes() == b"new"
    assert files.follow("memory://x/y") == "memory://x/y" and files.follow("/dev/stdout") == "/dev/stdout"


def test_a_device_is_written_into_and_stays(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"/dev/full: the storage failed .*No space left"):
        files.write_atomic("/dev/full", b"x")
    files.write_atomic("/dev/null", b"x")
    with files.writer("/dev/null") as file:
        file.write(b"y")
    assert all(stat.S_ISCHR(os.stat(path).st_mode) for path in ("/dev/full", "/dev/null"))


def test_a_named_pipe_is_written_into(tmp_path: Path) -> None:
    pipe = place(tmp_path / "pipe", "a named pipe")
    read = []
    reader = threading.Thread(target=lambda: read.append(Path(pipe).read_bytes()))
    reader.start()
    files.write_atomic(pipe, b"all of it")
    reader.join(patience())
    assert read == [b"all of it"] and stat.S_ISFIFO(os.stat(pipe).st_mode)


def test_a_named_pipe_that_nobody_reads_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "READER_S", 0.0)
    pipe = place(tmp_path / "pipe", "a named pipe")
    with pytest.raises(StorageError) as refused:
        files.write_atomic(pipe, b"x")
    assert str(refused.value) == f"{pipe}: nobody reads this named pipe since 0 s"


STREAMS = """
from storage.files import write_atomic
from storage.local import open_given
print("before", flush=True)
write_atomic("/dev/stdout", open_given("/dev/stdin").read())
print("after", flush=True)
"""


def test_streams_of_the_process_are_written_into_and_read(tmp_path: Path) -> None:
    with open(tmp_path / "out", "wb") as out:
        command = [sys.executable, "-c", STREAMS]
        subprocess.run(command, stdout=out, input=b"page\n", check=True, timeout=patience())
    assert (tmp_path / "out").read_text(encoding="utf-8") == "before\npage\nafter\n"


@pytest.mark.parametrize("kind", ["a named pipe", "a link"])
def test_a_lock_is_of_a_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "lock"
    place(path, kind) if kind == "a named pipe" else path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError) as refused:
        FileLock(path)
    assert str(refused.value) == f"{path} is {kind}, but must be a file: remove or rename it"
    assert find_holder(path) is None and not (tmp_path / "elsewhere").exists()
