from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.journal.journal import Fsync, Journal
from sf_core.dataplane.journal.journal_file import Event, make_decoder
from tests.bench import waits
from tests.bench.dataplane.full_disk import full_own_disk
from tests.bench.properties import examples

decode = msgspec.msgpack.decode

Record = dict[str, Any]
"""Stands for an event: a journal does not look into them."""


async def write(path: Path, records: list[Record]) -> None:
    journal = Journal(path)
    await asyncio.gather(*(journal.append(record) for record in records))
    await journal.close()


async def read(path: Path) -> list[Record]:
    journal = Journal(path)
    records = [record async for record in journal.replay(decode)]
    await journal.close()
    return records


RECORDS: list[Record] = [{"n": i, "data": bytes(i)} for i in range(20)]


async def test_appended_records_come_back_in_order(tmp_path: Path) -> None:
    await write(tmp_path / "a.journal", RECORDS[:10])
    await write(tmp_path / "a.journal", RECORDS[10:])
    assert await read(tmp_path / "a.journal") == RECORDS


async def test_there_is_nothing_to_replay_at_first(tmp_path: Path) -> None:
    assert await read(tmp_path / "new" / "a.journal") == []


@pytest.mark.parametrize("cut", [1, 5, 9])
async def test_a_torn_tail_is_cut_with_one_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cut: int
) -> None:
    path = tmp_path / "a.journal"
    await write(path, RECORDS)
    path.write_bytes(path.read_bytes()[:-cut])
    with caplog.at_level(logging.WARNING):
        assert await read(path) == RECORDS[:-1]
    assert len(caplog.records) == 1
    await write(path, RECORDS[-1:])
    assert await read(path) == RECORDS


async def test_a_corrupt_record_ends_the_replay(tmp_path: Path) -> None:
    path = tmp_path / "a.journal"
    await write(path, RECORDS)
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    assert await read(path) == RECORDS[:-1]


async def test_a_journal_that_another_version_wrote_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    class Weather(Event, tag="weather"):
        degrees: int

    path = tmp_path / "a.journal"
    await write(path, [Weather(20), {"weather": 20}])
    before = path.read_bytes()
    told = r"a\.journal was written by another version .* remove the file"
    with pytest.raises(ApiError, match=told) as refused:
        async for _ in Journal(path).replay(make_decoder(Weather)):
            pass
    assert refused.value.status == 409
    assert path.read_bytes() == before


async def test_compaction_keeps_what_it_is_told_to(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a.journal")
    await journal.compact(decode, lambda: ([], lambda record: True))
    for record in RECORDS:
        journal_write = asyncio.ensure_future(journal.append(record))
    await journal_write
    await journal.compact(decode, lambda: ([{"n": -1}], lambda record: record["n"] % 2 == 0))
    await journal.append({"n": 100})
    await journal.close()
    assert await read(tmp_path / "a.journal") == [{"n": -1}, *RECORDS[::2], {"n": 100}]


async def test_a_compaction_that_waits_for_another_one_keeps_what_is_appended_meanwhile(
    tmp_path: Path,
) -> None:
    journal = Journal(tmp_path / "a.journal")
    known: set[int] = set()

    async def append(n: int) -> None:
        known.add(n)
        await journal.append({"n": n})

    def choose() -> tuple[list[Record], Callable[[Record], bool]]:
        kept = frozenset(known)
        return [], lambda record: record["n"] in kept

    await append(0)
    compactions = [journal.compact(decode, choose) for _ in range(2)]
    await asyncio.gather(*compactions, append(1), append(2))
    await journal.close()
    assert [record["n"] for record in await read(tmp_path / "a.journal")] == [0, 1, 2]


@settings(max_examples=examples(60), deadline=None)
@given(
    records=st.lists(st.dictionaries(st.text(max_size=3), st.binary(max_size=20), min_size=1), max_size=8),
    cut=st.integers(0, 400),
    flips=st.lists(st.integers(0, 8 * 400 - 1), max_size=3),
)
async def test_whatever_happens_to_the_file_its_intact_beginning_comes_back(
    records: list[Record], cut: int, flips: list[int]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.journal"
        await write(path, records)
        data = bytearray(path.read_bytes() if path.exists() else b"")[:cut]
        for flip in flips:
            if flip // 8 < len(data):
                data[flip // 8] ^= 1 << flip % 8
        path.write_bytes(data)
        survived = await read(path)
        assert survived == records[: len(survived)]
        untouched = min([len(data), *(flip // 8 for flip in flips)])
        sizes = [8 + len(msgspec.msgpack.encode(record)) for record in records]
        assert len(survived) >= sum(end <= untouched for end in itertools.accumulate(sizes))
        # what is appended after the cut is read again
        await write(path, [{"new": b""}])
        assert await read(path) == [*survived, {"new": b""}]


async def test_zeros_behind_the_last_record_are_no_records(tmp_path: Path) -> None:
    """What some file systems leave after a power failure."""
    path = tmp_path / "a.journal"
    await write(path, RECORDS)
    path.write_bytes(path.read_bytes() + bytes(64))
    assert await read(path) == RECORDS


@pytest.mark.parametrize("fsync", ["turn", "chunk", "group"])
async def test_notes_and_chunks_keep_their_place_among_records(tmp_path: Path, fsync: Fsync) -> None:
    journal = Journal(tmp_path / "a.journal", fsync)
    journal.append_later({"n": 0})
    chunk = asyncio.ensure_future(journal.append_chunk({"n": 1}))
    await asyncio.sleep(0)
    journal.append_later({"n": 2})
    await asyncio.gather(chunk, journal.append({"n": 3}))
    assert [record["n"] async for record in journal.replay(decode)] == [0, 1, 2, 3]
    journal.append_later({"n": 4})
    await journal.close()
    assert [record["n"] for record in await read(tmp_path / "a.journal")] == [0, 1, 2, 3, 4]


LARGE = bytes(2000)


async def test_what_a_full_disk_does_not_take_is_written_in_its_place_once_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(tmp_path / "a.journal")
    await journal.append({"n": 0})
    with full_own_disk(1000):
        waiting = [asyncio.ensure_future(journal.append({"n": 1, "data": LARGE}))]
        await waits.until(lambda: journal.failure is not None)
        journal.append_later({"n": 2})
        waiting.append(asyncio.ensure_future(journal.append_chunk({"n": 3})))
        await asyncio.wait(waiting, timeout=0.1)
        assert [task.done() for task in waiting] == [False, False]
        found_by_a_restart = shutil.copy(tmp_path / "a.journal", tmp_path / "b.journal")
        assert [record async for record in Journal(Path(found_by_a_restart)).replay(decode)] == [{"n": 0}]
    await asyncio.gather(*waiting, journal.append({"n": 4}))
    assert (journal.failure, journal.num_failures) == (None, 1)
    await journal.close()
    assert [record["n"] for record in await read(tmp_path / "a.journal")] == [0, 1, 2, 3, 4]
    said = [
        record.getMessage() for record in caplog.records if record.name == "sf_core.dataplane.journal.journal"
    ]
    assert f"{tmp_path}/a.journal cannot be written: [Errno 27] File too large" in said[0]
    assert "can be written again" in said[-1]


async def test_what_an_fsync_lost_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.journal"
    fdatasync = os.fdatasync
    num_failures = 2

    def lose(fd: int) -> None:
        nonlocal num_failures
        if num_failures:
            num_failures -= 1
            # as a file system may: the pages that it could not write are gone, and read as zeros
            path.write_bytes(path.read_bytes()[:synced] + bytes(len(path.read_bytes()) - synced))
            raise OSError(errno.EIO, "Input/output error")
        fdatasync(fd)

    synced = 0
    journal = Journal(path)
    await journal.append({"n": 0})
    synced = path.stat().st_size
    monkeypatch.setattr(os, "fdatasync", lose)
    await journal.append_chunk({"n": 1})
    await asyncio.gather(journal.append({"n": 2}), journal.append({"n": 3}))
    await journal.close()
    assert [record["n"] for record in await read(path)] == [0, 1, 2, 3]


async def test_an_fsync_of_what_was_written_before_does_not_hide_that_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fdatasync = os.fdatasync
    may_end = threading.Event()

    def wait_and_sync(fd: int) -> None:
        may_end.wait(waits.patience())
        fdatasync(fd)

    monkeypatch.setattr(os, "fdatasync", wait_and_sync)
    journal = Journal(tmp_path / "a.journal")
    before = asyncio.ensure_future(journal.append({"n": 0}))
    await waits.until((tmp_path / "a.journal").exists)
    with full_own_disk(1000):
        waiting = asyncio.ensure_future(journal.append({"n": 1, "data": LARGE}))
        await waits.until(lambda: journal.failure is not None)
        may_end.set()
        await before
        with pytest.raises(ApiError, match="File too large"):
            journal.check()
    await waiting
    await journal.close()
    assert [record["n"] for record in await read(tmp_path / "a.journal")] == [0, 1]


async def test_who_is_attended_hears_at_once_that_the_disk_is_full_and_the_work_is_done_later(
    tmp_path: Path,
) -> None:
    done: list[int] = []

    journal = Journal(tmp_path / "a.journal")

    async def work(number: int) -> int:
        await journal.append({"n": number, "data": LARGE})
        done.append(number)
        return number

    with full_own_disk(1000):
        for n in range(2):
            with pytest.raises(ApiError, match=f"journal in {tmp_path}: File too large. Free") as refused:
                await journal.await_unless_failing(work(n))
            assert (refused.value.status, refused.value.retry_after_s) == (503, 5)
    await waits.until(lambda: done == [0, 1])
    assert await journal.await_unless_failing(work(2)) == 2
    await journal.close()
    assert [record["n"] for record in await read(tmp_path / "a.journal")] == [0, 1, 2]


async def test_a_journal_that_cannot_be_compacted_stays_as_it_was(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a.journal")
    await journal.append({"n": 0, "data": bytes(600)})
    with full_own_disk(1000):
        await journal.compact(decode, lambda: ([{"n": -1, "data": bytes(600)}], lambda record: True))
    await journal.append({"n": 1})
    await journal.close()
    assert [record["n"] for record in await read(tmp_path / "a.journal")] == [0, 1]
    assert sorted(tmp_path.iterdir()) == [tmp_path / "a.journal", tmp_path / "a.lock"]


async def test_a_journal_that_is_closed_on_a_full_disk_tells_who_waits(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a.journal")
    with full_own_disk(1000):
        waiting = asyncio.ensure_future(journal.append({"n": 1, "data": LARGE}))
        await waits.until(lambda: journal.failure is not None)
        await journal.close()
    with pytest.raises(ApiError, match="cannot write its journal"):
        await waiting


async def test_nobody_else_may_read_it(tmp_path: Path) -> None:
    await write(tmp_path / "a.journal", RECORDS)
    assert (tmp_path / "a.journal").stat().st_mode & 0o077 == 0
