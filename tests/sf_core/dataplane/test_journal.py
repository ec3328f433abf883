from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from sf_core.dataplane.journal import Journal, Record


def write(path: Path, records: list[Record]) -> None:
    async def append_all() -> None:
        journal = Journal(path)
        await asyncio.gather(*(journal.append(record) for record in records))
        await journal.close()

    asyncio.run(append_all())


RECORDS: list[Record] = [{"n": i, "data": bytes(i)} for i in range(20)]


def test_appended_records_come_back_in_order(tmp_path: Path) -> None:
    write(tmp_path / "a.journal", RECORDS[:10])
    write(tmp_path / "a.journal", RECORDS[10:])
    assert Journal(tmp_path / "a.journal").replay() == RECORDS


def test_there_is_nothing_to_replay_at_first(tmp_path: Path) -> None:
    assert Journal(tmp_path / "new" / "a.journal").replay() == []


@pytest.mark.parametrize("cut", [1, 5, 9])
def test_a_torn_tail_is_cut_with_one_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cut: int
) -> None:
    path = tmp_path / "a.journal"
    write(path, RECORDS)
    path.write_bytes(path.read_bytes()[:-cut])
    with caplog.at_level(logging.WARNING):
        assert Journal(path).replay() == RECORDS[:-1]
    assert len(caplog.records) == 1
    write(path, RECORDS[-1:])
    assert Journal(path).replay() == RECORDS


def test_a_corrupt_record_ends_the_replay(tmp_path: Path) -> None:
    path = tmp_path / "a.journal"
    write(path, RECORDS)
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    assert Journal(path).replay() == RECORDS[:-1]


def test_compaction_keeps_what_it_is_told_to(tmp_path: Path) -> None:
    async def compact() -> None:
        journal = Journal(tmp_path / "a.journal")
        await journal.compact(lambda record: True)
        for record in RECORDS:
            journal_write = asyncio.ensure_future(journal.append(record))
        await journal_write
        await journal.compact(lambda record: record["n"] % 2 == 0)
        await journal.append({"n": 100})
        await journal.close()

    asyncio.run(compact())
    assert Journal(tmp_path / "a.journal").replay() == [*RECORDS[::2], {"n": 100}]
