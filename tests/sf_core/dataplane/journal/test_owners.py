"""One process at a time has a journal, and none cuts off or replaces what another one wrote."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.journal.journal import Journal
from sf_core.dataplane.journal.ownership import Fence, NotOwnedError, Owner
from storage.local import FileLock
from storage.run_directory import RunDirectory
from tests.bench.properties import examples
from tests.bench.waits import wait_until

decode = msgspec.msgpack.decode


def no_locks(fd: int, operation: int) -> None:
    """flock of a file system without locks."""
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


async def read(journal: Journal) -> list[int]:
    return [record async for record in journal.replay(decode)]


async def read_alone(path: Path) -> list[int]:
    journal = Journal(path)
    records = await read(journal)
    await journal.close()
    return records


async def begun(path: Path, *records: int, owner: Owner | None = None) -> Journal:
    """An open journal with these records."""
    journal = Journal(path, owner=owner)
    await read(journal)
    for record in records:
        await journal.append(record)
    return journal


async def test_a_second_owner_is_refused_with_the_name_of_the_first_and_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.journal"
    first = await begun(path, 1, owner=Owner("http://127.0.0.1:7", str(tmp_path)))
    first.set_attempt(3)
    second = Journal(path)
    with pytest.raises(ApiError) as refused:
        await read(second)
    assert (refused.value.status, refused.value.code) == (409, "run_held")
    for part in ("run run is open at", "http://127.0.0.1:7", f"process {os.getpid()} on", "attempt 3"):
        assert part in refused.value.message
    assert "(dataplane.url), or end that process" in refused.value.message
    with pytest.raises(ApiError, match="is open at another data plane"):
        await second.append(9)
    await second.close()
    await first.append(2)
    await first.close()
    third = await begun(path)
    await third.append(3)
    await third.close()
    assert await read_alone(path) == [1, 2, 3]


@pytest.mark.parametrize("owner", [Owner(), Owner(flock=no_locks)])
async def test_what_another_process_appended_is_neither_cut_off_nor_replaced(
    tmp_path: Path, owner: Owner
) -> None:
    """A program that takes no lock, as earlier versions are."""
    path = tmp_path / "run.journal"
    journal = await begun(path, 1, 2, owner=owner)
    with path.open("ab") as file:
        file.write(path.read_bytes())
    before = path.read_bytes()
    waiting = [asyncio.ensure_future(journal.append(n)) for n in (3, 4)]
    for write in waiting:
        with pytest.raises(ApiError, match="another process changed") as refused:
            await write
        assert (refused.value.status, refused.value.code) == (409, "journal_changed")
    await journal.compact(decode, lambda: ([9], lambda record: False))
    with pytest.raises(ApiError, match="another process changed"):
        journal.check()
    assert path.read_bytes() == before
    await journal.close()
    assert path.read_bytes() == before


async def test_a_compaction_replaces_no_journal_of_another_process(tmp_path: Path) -> None:
    path = tmp_path / "run.journal"
    journal = await begun(path, 1)
    other = tmp_path / "other.journal"
    shutil.copy(path, other)
    os.replace(other, path)
    await journal.compact(decode, lambda: ([9], lambda record: True))
    assert journal.is_lost
    await journal.close()
    assert await read_alone(path) == [1]


@pytest.mark.parametrize("change", ["moved", "removed"])
async def test_a_journal_whose_folder_is_moved_or_removed_is_not_written_any_more(
    tmp_path: Path, change: str
) -> None:
    path = tmp_path / "run" / "run.journal"
    journal = await begun(path, 1)
    if change == "moved":
        (tmp_path / "run").rename(tmp_path / "moved")
    else:
        shutil.rmtree(tmp_path / "run")
    with pytest.raises(ApiError, match=r"another process changed, moved or removed .*run\.journal"):
        await journal.append(2)
    assert not await journal.resume()
    await journal.close()
    if change == "moved":
        # the second was not acknowledged
        assert (await read_alone(tmp_path / "moved" / "run.journal"))[:1] == [1]
    assert not (tmp_path / "run").exists()


async def test_a_journal_at_rest_is_resumed_unless_another_process_had_it(tmp_path: Path) -> None:
    path = tmp_path / "run.journal"
    first = await begun(path, 1)
    await first.release()
    assert await first.resume()
    await first.append(2)
    await first.release()
    second = await begun(path, 3)
    assert not await first.resume(), "the second has it"
    await first.close()
    await second.release()
    third = await begun(path, 4)
    await third.close()
    assert not await second.resume(), "the third had it"
    with pytest.raises(ApiError, match="another process changed"):
        await second.append(5)
    await second.close()
    assert await read_alone(path) == [1, 2, 3, 4]


async def test_who_looked_before_there_was_a_journal_does_not_append_to_that_of_another(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.journal"
    early = await begun(path)
    await (await begun(path, 1)).close()
    with pytest.raises(ApiError, match="another process changed"):
        await early.append(2)
    await early.close()
    assert await read_alone(path) == [1]


async def test_the_lock_of_a_killed_process_is_free_although_its_child_lives(tmp_path: Path) -> None:
    program = (
        "import asyncio, subprocess, sys\nfrom pathlib import Path\n"
        "from sf_core.dataplane.journal.journal import Journal\n"
        "async def main():\n"
        "    journal = Journal(Path(sys.argv[1]))\n"
        "    await journal.append(1)\n"
        "    child = subprocess.Popen(['sleep', '600'], close_fds=False, stdout=subprocess.DEVNULL)\n"
        "    print(child.pid, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())"
    )
    path = tmp_path / "run.journal"
    with subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout
        child = int(holder.stdout.readline())
        try:
            with pytest.raises(ApiError, match=f"process {holder.pid} on "):
                await read_alone(path)
            holder.kill()
            holder.wait()
            wait_until(lambda: Path("/proc", str(child)).exists())
            assert await read_alone(path) == [1]
        finally:
            os.kill(child, 9)


# --- properties

OPERATIONS = ["open", "append", "append", "append", "two", "compact", "rest", "resume", "close", "kill"]


class Writers:
    """Writers of one journal. What was acknowledged is found by the next owner: in order, and once."""

    def __init__(self, folder: Path, owner: Owner) -> None:
        self.path = folder / "run" / "run.journal"
        self.owner = owner
        self.directory = RunDirectory(str(folder / "run"))
        self.journals: dict[int, Journal] = {}
        self.attempts: dict[int, int] = {}
        self.sent: list[int] = []
        self.acknowledged: list[int] = []

    async def act(self, operation: str, writer: int) -> None:
        if operation == "open":
            return await self.open(writer)
        if (journal := self.journals.get(writer)) is None:
            return
        actions: dict[str, Callable[[], object]] = {
            "append": lambda: self.append(writer),
            "two": lambda: asyncio.gather(self.append(writer), self.append(writer)),
            "compact": lambda: journal.compact(decode, lambda: ([], lambda record: True)),
            "rest": journal.release,
            "resume": journal.resume,
            "close": lambda: self.drop(writer).close(),
            "kill": lambda: self.kill(writer),
        }
        try:
            await actions[operation]()  # type: ignore[misc]
        except ApiError as error:
            assert error.status == 409

    async def open(self, writer: int) -> None:
        if writer in self.journals:
            await self.drop(writer).close()
        # as a flow does before it registers
        attempt = self.directory.begin_attempt()
        before = self.acknowledged.copy()
        journal = Journal(self.path, owner=self.owner)
        try:
            self.check(await read(journal), before)
        except ApiError as error:
            assert error.status == 409
            await journal.close()
        else:
            self.journals[writer] = journal
            self.attempts[writer] = attempt

    async def append(self, writer: int) -> None:
        journal = self.journals[writer]
        attempt = self.attempts[writer]
        self.sent.append(record := len(self.sent))
        await journal.append(record)
        fence = Fence(lambda: self.directory.is_superseded(attempt))
        if journal.is_exclusive or not await fence.is_superseded():
            self.acknowledged.append(record)

    async def kill(self, writer: int) -> None:
        """Nothing that is pending is written, and the lock is free."""
        journal = self.drop(writer)
        await journal.give_up(NotOwnedError("it was killed", "killed"))
        await journal.close()

    def drop(self, writer: int) -> Journal:
        del self.attempts[writer]
        return self.journals.pop(writer)

    def check(self, found: list[int], acknowledged: list[int]) -> None:
        assert len(set(found)) == len(found)
        assert set(found) <= set(self.sent)
        # of two that were written together, the second may be acknowledged first
        assert [record for record in found if record in acknowledged] == sorted(acknowledged)

    async def end(self) -> None:
        for writer in list(self.journals):
            await self.drop(writer).close()
        last = Journal(self.path, owner=self.owner)
        self.check(await read(last), self.acknowledged)
        await last.close()


STEPS = st.lists(
    st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 1)), min_size=1, max_size=4), max_size=15
)
"""Operations of two writers; those of a list happen at the same time."""


async def run_writers(steps: list[list[tuple[str, int]]], owner: Owner) -> None:
    async def in_turn(writers: Writers, names: list[str], writer: int) -> None:
        for name in names:
            await writers.act(name, writer)

    with tempfile.TemporaryDirectory() as folder:
        writers = Writers(Path(folder), owner)
        await writers.open(0)
        for step in steps:
            # each writer does one thing at a time
            own = {writer: [name for name, by in step if by == writer] for writer in (0, 1)}
            await asyncio.gather(*(in_turn(writers, names, writer) for writer, names in own.items()))
        await writers.end()


@settings(max_examples=examples(150), deadline=None)
@given(STEPS)
async def test_of_two_writers_nothing_acknowledged_is_lost_or_doubled(
    steps: list[list[tuple[str, int]]],
) -> None:
    await run_writers(steps, Owner())


@settings(max_examples=examples(150), deadline=None)
@given(STEPS)
async def test_of_two_writers_without_locks_nothing_acknowledged_is_lost_or_doubled(
    steps: list[list[tuple[str, int]]],
) -> None:
    await run_writers(steps, Owner(flock=no_locks))


def test_a_lock_on_a_removed_folder_is_not_taken_for_that_of_the_new_one(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    with FileLock(folder / "lock"):
        shutil.rmtree(folder)
        folder.mkdir()
        with FileLock(folder / "lock") as second:
            assert second.is_enforced
