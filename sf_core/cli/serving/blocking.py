"""Ends code that keeps the event loop from turning: with it, no other session of a worker would go on."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from traceback import walk_stack
from types import FrameType

from sf_core.agents.loop_watch import BLOCKED_S
from sf_core.user_code import is_own

_BEAT_S = 0.5


class BlockedError(BaseException):
    """Raised in the user's code that blocks. No `except Exception` of that code can hide it."""


@asynccontextmanager
async def not_blocking() -> AsyncIterator[None]:
    """Raise BlockedError in the user's code that keeps the loop of the main thread for BLOCKED_S."""

    async def beat() -> None:
        while True:
            signal.setitimer(signal.ITIMER_REAL, BLOCKED_S, BLOCKED_S)
            await asyncio.sleep(_BEAT_S)

    before = signal.signal(signal.SIGALRM, _interrupt)
    beating = asyncio.create_task(beat())
    try:
        yield
    finally:
        beating.cancel()
        with suppress(asyncio.CancelledError):
            await beating
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if frame is not None and any(is_own(at.f_code.co_filename) for at, _ in walk_stack(frame)):
        raise BlockedError(
            f"the agent blocked the event loop for {BLOCKED_S:g} s: await the slow call, or remove `async` "
            "from the agent, so that it runs in a thread"
        )
