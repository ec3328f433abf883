from __future__ import annotations

import asyncio
import itertools
import logging
import resource
import signal
import tempfile
from pathlib import Path

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sf_core.dataplane.journal import Fsync, Journal, Record


def write(path: Path, records: list[Record]) -> None:
    async def append_all() -> None:
        journal = Journal(path)
        await asyncio.gather(*(journal.append(record) for record in records))
        await journal.close()

    asyncio.run(append_all())


def read(path: Path) -> list[Record]:
    async def replay() -> list[Record]:
        return [record async for record in Journal(path).replay()]

    return asyncio.run(replay())


RECORDS: list[Record] = [{"n": i, "data": bytes(i)} for i in range(20)]


def test_appended_records_come_back_in_order(tmp_path: Path) -> None:
    write(tmp_path / "a.journal", RECORDS[:10])
    write(tmp_path / "a.journal", RECORDS[10:])
    assert read(tmp_path / "a.journal") == RECORDS


def test_there_is_nothing_to_replay_at_first(tmp_path: Path) -> None:
    assert read(tmp_path / "new" / "a.journal") == []


@pytest.mark.parametrize("cut", [1, 5, 9])
def test_a_torn_tail_is_cut_with_one_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cut: int
) -> None:
    path = tmp_path / "a.journal"
    write(path, RECORDS)
    path.write_bytes(path.read_bytes()[:-cut])
    with caplog.at_level(logging.WARNING):
        assert read(path) == RECORDS[:-1]
    assert len(caplog.records) == 1
    write(path, RECORDS[-1:])
    assert read(path) == RECORDS


def test_a_corrupt_record_ends_the_replay(tmp_path: Path) -> None:
    path = tmp_path / "a.journal"
    write(path, RECORDS)
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    assert read(path) == RECORDS[:-1]


def test_compaction_keeps_what_it_is_told_to(tmp_path: Path) -> None:
    async def compact() -> None:
        journal = Journal(tmp_path / "a.journal")
        await journal.compact([], lambda record: True)
        for record in RECORDS:
            journal_write = asyncio.ensure_future(journal.append(record))
        await journal_write
        await journal.compact([{"n": -1}], lambda record: record["n"] % 2 == 0)
        await journal.append({"n": 100})
        await journal.close()

    asyncio.run(compact())
    assert read(tmp_path / "a.journal") == [{"n": -1}, *RECORDS[::2], {"n": 100}]


@settings(max_examples=60, deadline=None)
@given(
    records=st.lists(st.dictionaries(st.text(max_size=3), st.binary(max_size=20), min_size=1), max_size=8),
    cut=st.integers(0, 400),
    flips=st.lists(st.integers(0, 8 * 400 - 1), max_size=3),
)
def test_whatever_happens_to_the_file_its_intact_beginning_comes_back(
    records: list[Record], cut: int, flips: list[int]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.journal"
        write(path, records)
        data = bytearray(path.read_bytes() if path.exists() else b"")[:cut]
        for flip in flips:
            if flip // 8 < len(data):
                data[flip // 8] ^= 1 << flip % 8
        path.write_bytes(data)
        survived = read(path)
        assert survived == records[: len(survived)]
        untouched = min([len(data), *(flip // 8 for flip in flips)])
        sizes = [8 + len(msgpack.packb(record)) for record in records]
        assert len(survived) >= sum(end <= untouched for end in itertools.accumulate(sizes))
        # what is appended after the cut is read again
        write(path, [{"new": b""}])
        assert read(path) == [*survived, {"new": b""}]


def test_zeros_behind_the_last_record_are_no_records(tmp_path: Path) -> None:
    """What some file systems leave after a power failure."""
    path = tmp_path / "a.journal"
    write(path, RECORDS)
    path.write_bytes(path.read_bytes() + bytes(64))
    assert read(path) == RECORDS


@pytest.mark.parametrize("fsync", ["turn", "chunk", "group"])
def test_notes_and_chunks_keep_their_place_among_records(tmp_path: Path, fsync: Fsync) -> None:
    async def append() -> None:
        journal = Journal(tmp_path / "a.journal", fsync)
        journal.note({"n": 0})
        chunk = asyncio.ensure_future(journal.append_chunk({"n": 1}))
        await asyncio.sleep(0)
        journal.note({"n": 2})
        await asyncio.gather(chunk, journal.append({"n": 3}))
        assert [record["n"] async for record in journal.replay()] == [0, 1, 2, 3]
        journal.note({"n": 4})
        await journal.close()

    asyncio.run(append())
    assert [record["n"] for record in read(tmp_path / "a.journal")] == [0, 1, 2, 3, 4]


def test_who_appends_to_a_full_disk_is_told_and_what_follows_is_whole(tmp_path: Path) -> None:
    async def append() -> None:
        journal = Journal(tmp_path / "a.journal")
        await journal.append({"n": 0})
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
        try:
            with pytest.raises(OSError):
                await journal.append({"n": 1, "data": bytes(2000)})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
            signal.signal(signal.SIGXFSZ, handler)
        await journal.append({"n": 2})
        await journal.close()

    asyncio.run(append())
    assert read(tmp_path / "a.journal") == [{"n": 0}, {"n": 2}]


def test_nobody_else_may_read_it(tmp_path: Path) -> None:
    write(tmp_path / "a.journal", RECORDS)
    assert (tmp_path / "a.journal").stat().st_mode & 0o077 == 0
