"""Ends code that keeps the event loop from turning: with it, no other session of a worker would go on."""

from __future__ import annotations

import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from traceback import walk_stack
from types import FrameType

from sf_core.agents import loop_watch
from sf_core.user_code import is_own


class BlockedError(BaseException):
    """Raised in the user's code that blocks. No `except Exception` of that code can hide it."""


@asynccontextmanager
async def not_blocking() -> AsyncIterator[None]:
    """Raise BlockedError in the user's code that blocks the loop of the main thread."""
    thread = threading.get_ident()
    before = signal.signal(signal.SIGALRM, _interrupt)
    try:
        # a signal also ends a call that waits in the kernel
        with loop_watch.watch_for_blocks(lambda frame: signal.pthread_kill(thread, signal.SIGALRM)):
            yield
    finally:
        signal.signal(signal.SIGALRM, before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if frame is not None and any(is_own(at.f_code.co_filename) for at, _ in walk_stack(frame)):
        raise BlockedError(
            f"the agent blocked the event loop for {loop_watch.BLOCKED_S:g} s: await the slow call, or "
            "remove `async` from the agent, so that it runs in a thread"
        )
