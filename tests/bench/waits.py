"""How long tests wait for what must happen. A wait that ends too early fails a sound test, so no test has a
deadline of its own: all of them grow with the load of the machine."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from typing import Any


def patience(quiet_s: float = 180.0) -> float:
    """Seconds to wait: `quiet_s` on a quiet machine, in proportion more where processes wait for a core.
    The default is more than any step of a run takes here."""
    return quiet_s * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def wait_until(
    probe: Callable[[], Any], what: str = "this", every_s: float = 0.005, quiet_s: float = 180.0
) -> Any:
    """What `probe` returns once it is true. Raises AssertionError if it stays false too long."""
    began = time.monotonic()
    while not (value := probe()):
        _check(began, what, quiet_s)
        time.sleep(every_s)
    return value


async def until(probe: Callable[[], Any], what: str = "this", every_s: float = 0.001) -> None:
    """`wait_until` for coroutines."""
    began = time.monotonic()
    while not probe():
        _check(began, what)
        await asyncio.sleep(every_s)


def _check(began: float, what: str, quiet_s: float = 180.0) -> None:
    # the load is read each time, because it may rise during the wait
    waited_s = time.monotonic() - began
    assert waited_s < patience(quiet_s), f"waited {waited_s:.0f} s for {what}"


def join(*threads: threading.Thread) -> None:
    """Wait for threads to end. Raises AssertionError if one does not."""
    for thread in threads:
        thread.join(patience())
        assert not thread.is_alive(), f"{thread.name} has not ended"
