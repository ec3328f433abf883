from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator

import pytest

from sf_core.agents import event_loop as threads_module
from sf_core.agents.event_loop import Threads
from tests.bench.waits import patience


@pytest.fixture
def over() -> Iterator[threading.Event]:
    """Event that is set after the test, to end calls that wait for it."""
    event = threading.Event()
    yield event
    event.set()


async def leave(threads: Threads, num_calls: int, over: threading.Event) -> list[threading.Thread]:
    """Cancel `num_calls` calls whose threads go on; returns the threads."""
    begun: list[threading.Thread] = []

    def hang() -> None:
        begun.append(threading.current_thread())
        over.wait(patience())

    calls = [asyncio.ensure_future(threads.call(hang)) for _ in range(num_calls)]
    while len(begun) < num_calls:
        await asyncio.sleep(0.001)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    return begun


async def test_as_many_plain_functions_run_at_once_as_are_called() -> None:
    barrier = threading.Barrier(40, timeout=patience())
    threads = Threads()
    places = await asyncio.gather(*(threads.call(barrier.wait) for _ in range(40)))
    assert sorted(places) == list(range(40))


def test_a_call_that_hangs_does_not_keep_the_loop_from_ending(over: threading.Event) -> None:
    hanging = asyncio.run(leave(Threads(), 2, over))
    # had they been waited for, they had come to their end
    assert [thread.is_alive() for thread in hanging] == [True, True]


async def test_calls_that_go_on_unawaited_count_once_they_are_many_and_until_they_end(
    over: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(threads_module, "MAX_LEFT", 2)
    with caplog.at_level(logging.WARNING):
        async with asyncio.timeout(patience()):
            threads = Threads()
            await leave(threads, 2, over)
            assert (threads.num_excess, caplog.messages) == (0, [])
            await leave(threads, 2, over)
            assert threads.num_excess == 2
            over.set()
            while threads.num_excess:
                await asyncio.sleep(0.001)
    [told] = caplog.messages
    assert told.startswith(
        "3 calls still run although their sessions have ended (newest call: leave.<locals>.hang"
    )


@pytest.mark.parametrize("error", [KeyError("x"), StopIteration()])
async def test_what_a_plain_function_raises_comes_back(error: Exception) -> None:
    def fail() -> None:
        raise error

    with pytest.raises((KeyError, RuntimeError), match=r"x|raised StopIteration"):
        await asyncio.wait_for(Threads().call(fail), patience())
