from __future__ import annotations

import asyncio
import inspect
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sf_core.agents import event_loop
from sf_core.agents.event_loop import log_blocks, place_of_step
from tests.bench.waits import patience, wait_until


async def test_each_block_of_the_loop_is_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_loop, "BLOCKED_S", 0.2)
    monkeypatch.setattr(event_loop, "LOOK_S", 0.01)

    async def agent(number: int) -> None:
        wait_until(lambda: len(caplog.messages) == number)

    with log_blocks(lambda: 7):
        for number in (1, 2):
            await asyncio.create_task(agent(number))
            # the watch sees that the loop turns, and looks again
            await asyncio.sleep(0.1)
    assert len(caplog.messages) == 2
    for message in caplog.messages:
        assert " has blocked the event loop for 0.2 s, and the 7 sessions" in message


@pytest.fixture
def busy_core() -> Iterator[int]:
    """A core for which eight processes compete."""
    core = min(os.sched_getaffinity(0))
    program = f"import os; os.sched_setaffinity(0, [{core}]); print(flush=True)\nwhile True: pass"
    rivals = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) for _ in range(8)]
    try:
        for rival in rivals:
            assert rival.stdout is not None and rival.stdout.readline()
        yield core
    finally:
        for rival in rivals:
            rival.kill()
            rival.communicate()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how long a thread waits for a core")
async def test_a_machine_that_is_busy_blocks_no_loop(
    busy_core: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_loop, "BLOCKED_S", 1.0)
    monkeypatch.setattr(event_loop, "LOOK_S", 0.01)

    def queued_s() -> float:
        return int(Path("/proc/thread-self/schedstat").read_text(encoding="utf-8").split()[1]) / 1e9

    async def agent() -> None:
        cores = os.sched_getaffinity(0)
        began = queued_s()
        os.sched_setaffinity(0, [busy_core])
        try:
            while queued_s() < began + 2.0:
                pass
        finally:
            os.sched_setaffinity(0, cores)
        time.sleep(0.1)

    async def blocking_agent() -> None:
        wait_until(lambda: caplog.messages)

    with log_blocks(lambda: 7):
        await asyncio.create_task(agent())
        assert not caplog.messages, "the agent computes little"
        await asyncio.create_task(blocking_agent())
    [message] = caplog.messages
    assert " has blocked the event loop for 1 s" in message


async def place_in(*, is_inside_the_library: bool) -> str:
    """The place that is named while a library calls back a function of the user's or is itself at work."""
    places: list[str] = []

    def encode(value: object) -> str:
        frame = inspect.currentframe()
        assert frame is not None and frame.f_back is not None
        places.append(place_of_step(frame.f_back if is_inside_the_library else frame))
        return ""

    async def agent() -> None:
        # with an indent, the encoder has frames of its own
        json.dumps([object()], default=encode, indent=1)

    await asyncio.wait_for(asyncio.create_task(agent()), patience())
    return places[0]


@pytest.mark.parametrize(("is_inside_the_library", "function"), [(True, "agent"), (False, "encode")])
async def test_the_innermost_line_of_the_users_own_is_named(
    is_inside_the_library: bool, function: str
) -> None:
    place = await place_in(is_inside_the_library=is_inside_the_library)
    assert place.startswith(f"{__file__}:")
    assert place.endswith(f".<locals>.{function})")
