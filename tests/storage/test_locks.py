from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from storage.local import FileLock, HeldError, describe, find_holder


def test_a_held_lock_names_its_holder_until_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    assert find_holder(path) is None
    with FileLock(path) as lock:
        assert find_holder(path) == {}, "it has not told who it is"
        lock.record(attempt=2)
        with pytest.raises(HeldError, match=f"locked by process {os.getpid()} on ") as held:
            FileLock(path)
        assert held.value.facts["attempt"] == 2
        facts = find_holder(path)
        assert facts is not None and describe(facts).startswith(f"process {os.getpid()} on ")
        lock.record()
        assert "attempt" not in (find_holder(path) or {})
    assert find_holder(path) is None
    with FileLock(path):
        pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP])
def test_on_a_file_system_without_locks_everybody_has_it_and_knows(tmp_path: Path, number: int) -> None:
    def flock(fd: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    with FileLock(tmp_path / "a", flock=flock) as one, FileLock(tmp_path / "a", flock=flock) as other:
        assert (one.is_enforced, other.is_enforced) == (False, False)


def test_another_error_is_not_taken_for_a_file_system_without_locks(tmp_path: Path) -> None:
    def flock(fd: int, operation: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(OSError, match="Input/output error"):
        FileLock(tmp_path / "a", flock=flock)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"pid": 1}', b'{"pid": 1, "host": 2, "since": "x"}'])
def test_facts_that_cannot_be_read_name_nobody(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.lock"
    with FileLock(path):
        path.write_bytes(content)
        with pytest.raises(HeldError, match="locked by another process"):
            FileLock(path)
