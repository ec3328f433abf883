"""What is done for large requests in threads."""

from __future__ import annotations

import asyncio
import threading

from sf_core.dataplane.large_requests import in_thread_if
from tests.bench.waits import until


async def test_two_large_requests_are_worked_on_at_a_time_and_small_ones_do_not_wait() -> None:
    running: list[int] = []
    go_on = threading.Event()

    def work(number: int) -> int:
        running.append(number)
        go_on.wait()
        return number

    large = [asyncio.ensure_future(in_thread_if(True, work, number)) for number in range(4)]
    await until(lambda: len(running) == 2)
    assert await in_thread_if(False, lambda: "small") == "small"
    assert running == [0, 1]
    go_on.set()
    assert await asyncio.gather(*large) == [0, 1, 2, 3]
