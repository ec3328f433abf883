"""Names what blocks an event loop: an agent that does not await keeps all sessions of its process waiting."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from traceback import walk_stack
from types import FrameType

from sf_core.user_code import is_own

log = logging.getLogger(__name__)

BLOCKED_S = 5.0
"""A loop that does not turn for this long is blocked."""

LOOK_S = 1.0

_STEP = asyncio.Handle._run.__code__


@contextmanager
def watch_for_blocks(num_sessions: Callable[[], int]) -> Iterator[None]:
    """Log once per block of the running loop where it is blocked, and how many sessions wait."""
    loop, thread = asyncio.get_running_loop(), threading.get_ident()
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(LOOK_S):
            has_turned = threading.Event()
            loop.call_soon_threadsafe(has_turned.set)
            if has_turned.wait(BLOCKED_S) or is_over.is_set():
                continue
            log.warning(
                "%s has blocked the event loop for %g s, and the %d sessions of this worker wait: await "
                "slow calls in this function, or remove `async`, so that the function runs in a thread",
                place_of_step(sys._current_frames()[thread]),
                BLOCKED_S,
                num_sessions(),
            )
            while not (has_turned.wait(LOOK_S) or is_over.is_set()):
                pass

    threading.Thread(target=watch, name="loop-watch", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def place_of_step(innermost: FrameType) -> str:
    """File, line and function in which a step of the loop is: the innermost that are the user's own."""
    frames = [frame for frame, _ in takewhile(lambda at: at[0].f_code is not _STEP, walk_stack(innermost))]
    own = [frame for frame in frames if is_own(frame.f_code.co_filename)]
    frame = (own or frames or [innermost])[0]
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_qualname})"
