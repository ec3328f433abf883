"""Which sessions leave memory, and that they come back whole."""

from __future__ import annotations

import asyncio
import gc
import logging
import tracemalloc
from pathlib import Path

import pytest

from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.journal.journal import frames
from sf_core.dataplane.journal.memory import Memory
from sf_core.dataplane.sessions.claims import Claim, SessionSlot
from sf_core.dataplane.sessions.finished import FinishedSession
from sf_core.dataplane.sessions.session import Session
from tests.sf_core.dataplane.conversations import state_of
from tests.sf_core.dataplane.full_disk import full_own_disk
from tests.sf_core.dataplane.sessions.test_session import export, sample, user
from tests.sf_core.dataplane.stand import say

KB = 1 / 1024
"""A kilobyte in MB."""
ROOM = 2**30
"""Memory bound of 1 GiB, in bytes."""


def played(renderer: Renderer, name: str = "s", num_turns: int = 5) -> Session:
    """A session of about ten kilobytes."""
    session = Session(name)
    messages = [user(f"{name} asks {'the quick brown fox ' * 50}")]
    for i in range(num_turns):
        turn = sample(session, renderer, messages, say(renderer, f"the answer {i} {'jumps ' * 20}"))
        messages = [*messages, turn.message, user(f"and {i}?")]
    return session


def result_of(session: Session, renderer: Renderer) -> FinishedSession:
    return FinishedSession(
        "s", Claim(SessionSlot("train", 0, 0), 0), 1.0, "e", 0, 0, export(session, renderer)
    )


async def settled(memory: Memory) -> None:
    await asyncio.sleep(0)
    await memory.make_room()


def on_disk(memory: Memory, sessions: list[Session]) -> list[bool]:
    return [memory.is_on_disk(session) for session in sessions]


def test_those_used_least_recently_leave_and_no_more_than_needed(tmp_path: Path, renderer: Renderer) -> None:
    sessions = [played(renderer, str(i)) for i in range(8)]
    each = sessions[0].num_bytes

    async def scenario() -> None:
        memory = Memory(8 * each * KB * KB)
        for session in sessions[:6]:
            memory.add(session, tmp_path)
        memory.use(sessions[0])
        assert on_disk(memory, sessions[:6]) == [False] * 6
        for session in sessions[6:]:
            memory.add(session, tmp_path)
        await settled(memory)
        assert on_disk(memory, sessions) == [False, True, True, False, False, False, False, False]
        assert memory.num_bytes <= 0.8 * memory.bound_bytes
        assert memory.num_bytes == sum(session.num_bytes for session in sessions)

    asyncio.run(scenario())


def test_results_leave_before_sessions(tmp_path: Path, renderer: Renderer) -> None:
    sessions = [played(renderer, str(i)) for i in range(3)]
    result = result_of(played(renderer, "over", num_turns=9), renderer)

    async def scenario() -> None:
        memory = Memory(4 * sessions[0].num_bytes * KB * KB)
        for session in sessions:
            memory.add(session, tmp_path)
        memory.add(result, tmp_path, goes_first=True)
        await settled(memory)
        assert memory.is_on_disk(result)
        assert on_disk(memory, sessions) == [False] * 3
        read = memory.reader(result)
        assert read is not None
        assert len(read()) == 1

    asyncio.run(scenario())


def test_what_comes_back_is_what_left(tmp_path: Path, renderer: Renderer) -> None:
    session, result = played(renderer), result_of(played(renderer), renderer)
    before, rows = state_of(session), [(row.token_ids.tolist(), row.messages) for row in result.trajectories]

    async def scenario() -> None:
        memory = Memory(KB)
        for item in (session, result):
            memory.add(item, tmp_path)
        await settled(memory)
        assert session.turns == [] and result.trajectories == []
        memory.bound_bytes = ROOM  # or what comes back could leave again
        await asyncio.gather(*(memory.load(item) for item in (session, result, session)))
        assert state_of(session) == before
        assert [(row.token_ids.tolist(), row.messages) for row in result.trajectories] == rows

    asyncio.run(scenario())


def test_a_session_used_while_it_is_written_stays(tmp_path: Path, renderer: Renderer) -> None:
    async def scenario() -> None:
        session, memory = played(renderer), Memory(KB)
        memory.add(session, tmp_path)
        await asyncio.sleep(0)
        memory.bound_bytes = 2**20
        memory.use(session)
        sample(session, renderer, [user("more")], say(renderer, "x"))
        await settled(memory)
        assert not memory.is_on_disk(session)
        assert len(session.turns) == 6
        await no_files(tmp_path)

    asyncio.run(scenario())


async def no_files(folder: Path) -> None:
    async with asyncio.timeout(5):
        while [path for path in folder.rglob("*") if path.is_file()]:
            await asyncio.sleep(0.01)


def test_files_are_private_and_go_with_their_sessions(tmp_path: Path, renderer: Renderer) -> None:
    async def scenario() -> None:
        folder, memory = tmp_path / "run.spill", Memory(KB)
        sessions = [played(renderer, str(i)) for i in range(3)]
        for session in sessions:
            memory.add(session, folder)
        await settled(memory)
        files = list(folder.iterdir())
        assert len(files) == 3
        assert {path.stat().st_mode & 0o077 for path in [folder, *files]} == {0}
        for session in sessions:
            memory.remove(session)
        await no_files(folder)
        assert memory.num_bytes == 0
        memory.add(sessions[0], folder)
        await memory.close()
        assert not folder.exists()

    asyncio.run(scenario())


def test_on_a_full_disk_sessions_stay_in_memory_and_one_line_says_so(
    tmp_path: Path, renderer: Renderer, caplog: pytest.LogCaptureFixture
) -> None:
    sessions = [played(renderer, str(i)) for i in range(3)]
    before = [state_of(session) for session in sessions]

    async def scenario() -> None:
        memory = Memory(KB)
        with full_own_disk(3000):
            for session in sessions:
                memory.add(session, tmp_path)
                await settled(memory)
                memory.use(session)
                await settled(memory)
        assert on_disk(memory, sessions) == [False] * 3
        assert [state_of(session) for session in sessions] == before
        await no_files(tmp_path)
        memory._retry_at = 0.0
        memory.use(sessions[0])
        await settled(memory)
        assert on_disk(memory, sessions) == [True] * 3

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    assert len(caplog.records) == 1
    assert "they cannot be written" in caplog.text


@pytest.mark.parametrize("damage", ["gone", "cut", "cut_between_records", "flipped"])
def test_a_file_that_is_not_what_was_written_is_an_error_not_another_session(
    tmp_path: Path, renderer: Renderer, damage: str
) -> None:
    async def scenario() -> None:
        session, memory = played(renderer), Memory(KB)
        memory.add(session, tmp_path)
        await settled(memory)
        [file] = tmp_path.iterdir()
        data = file.read_bytes()
        with file.open("rb") as opened:
            whole = list(frames(opened))
        if damage == "gone":
            file.unlink()
        else:
            flipped = bytes([*data[:-3], data[-3] ^ 1, *data[-2:]])
            broken = {"cut": data[:-1], "cut_between_records": b"".join(whole[:-1]), "flipped": flipped}
            file.write_bytes(broken[damage])
        with pytest.raises(ApiError, match="The record of session s cannot be read back") as raised:
            await memory.load(session)
        assert raised.value.status == 500
        assert session.turns == []
        if damage != "gone":
            file.write_bytes(data)
            memory.bound_bytes = ROOM  # or it could leave again
            await memory.load(session)
            assert len(session.turns) == 5

    asyncio.run(scenario())


def test_a_record_can_be_put_behind_those_on_disk(tmp_path: Path, renderer: Renderer) -> None:
    living, session = played(renderer, num_turns=2), played(renderer, num_turns=1)
    later = list(living.records())[2:]

    async def scenario() -> None:
        memory = Memory(KB)
        memory.add(session, tmp_path)
        assert not await memory.append(session, later[0]), "it is in memory"
        await settled(memory)
        for record in later:
            assert await memory.append(session, record)
        memory.bound_bytes = ROOM
        await memory.load(session)

    asyncio.run(scenario())
    assert state_of(session) == state_of(living)


def test_what_is_counted_is_about_what_it_takes(renderer: Renderer) -> None:
    played(renderer)
    gc.collect()
    tracemalloc.start()
    try:
        sessions = [played(renderer, str(i), num_turns=20) for i in range(20)]
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    counted = sum(session.num_bytes for session in sessions)
    assert 0.9 * taken < counted < 1.5 * taken
