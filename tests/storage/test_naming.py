import ctypes
import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from storage import files, local
from storage.errors import StorageError
from storage.run_directory import RunDirectory


@pytest.fixture(params=["EPERM", "EOPNOTSUPP", "ENOSYS", "EMLINK"])
def linkless(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a file system without hard links."""
    code = getattr(errno, request.param)

    def refuse(source: str, target: str) -> None:
        raise OSError(code, os.strerror(code), source, None, target)

    monkeypatch.setattr(os, "link", refuse)


def create(path: Path, content: bytes) -> bool:
    try:
        files.write_atomic(str(path), content, create=True)
    except FileExistsError:
        return False
    return True


@pytest.mark.usefixtures("linkless")
def test_without_hard_links_one_of_many_creators_wins(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda number: create(tmp_path / "x", str(number).encode()), range(32)))
    assert sum(won) == 1
    assert (tmp_path / "x").read_bytes() == str(won.index(True)).encode()
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.usefixtures("linkless")
def test_without_hard_links_runs_begin_attempts(tmp_path: Path) -> None:
    files.check_writable(str(tmp_path))
    run = RunDirectory(str(tmp_path / "a"))
    assert [run.begin_attempt(), run.begin_attempt()] == [1, 2]


@pytest.mark.usefixtures("linkless")
def test_a_file_system_that_would_let_two_creators_win_is_refused_before_a_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown_flag(*_: object) -> int:
        ctypes.set_errno(errno.EINVAL)
        return -1

    for call in (unknown_flag, None):
        monkeypatch.setattr(local, "_renameat2", call)
        with pytest.raises(StorageError, match=rf"^{tmp_path}: .*neither hard links nor a rename") as refused:
            files.check_writable(str(tmp_path))
        assert "AWS" not in str(refused.value)
        with pytest.raises(StorageError, match="neither hard links nor a rename"):
            create(tmp_path / "x", b"")
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_no_lack_of_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: str, target: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), source, None, target)

    monkeypatch.setattr(os, "link", full)
    with pytest.raises(StorageError, match="No space left"):
        create(tmp_path / "x", b"")
    assert os.listdir(tmp_path) == []
