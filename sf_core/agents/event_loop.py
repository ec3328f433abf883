"""The event loop of a runner. Plain functions are called beside it, each in a thread of its own. What blocks
it is named in the log: an agent that does not await keeps all sessions of its process waiting.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import copy_context
from itertools import count
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any, NamedTuple

from sf_core.process.user_code import is_own

log = logging.getLogger(__name__)

MAX_LEFT = 256
"""Number of abandoned calls that may go on before each takes the place of another."""


class Threads:
    """A thread cannot be stopped: an abandoned call goes on until it returns or the process ends."""

    def __init__(self) -> None:
        self._num_left = 0
        self._has_told = False

    @property
    def num_excess(self) -> int:
        """Number of abandoned calls beyond MAX_LEFT."""
        return max(0, self._num_left - MAX_LEFT)

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a plain function in a thread, where it blocks nobody, or an async one here; returns or raises
        what it does."""
        if inspect.iscoroutinefunction(function):
            return await function(*args)
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
        context = copy_context()

        def settle(value: Any, error: BaseException | None) -> None:
            if outcome.cancelled():
                self._num_left -= 1
            else:
                # as a value: futures refuse a StopIteration, and the caller would wait for ever
                outcome.set_result((value, error))

        def work() -> None:
            value = None
            error = None
            try:
                value = context.run(function, *args)
            except BaseException as raised:  # raised again in the caller
                error = raised
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(settle, value, error)

        threading.Thread(target=work, name="plain-function", daemon=True).start()
        try:
            value, error = await outcome
        except asyncio.CancelledError:
            if outcome.cancelled():
                self._num_left += 1
                self._tell_if_too_many(function)
            raise
        if error is not None:
            raise error
        return value

    def _tell_if_too_many(self, function: Callable[..., Any]) -> None:
        if self.num_excess and not self._has_told:
            self._has_told = True
            log.warning(
                "%d calls still run although their sessions have ended (newest call: %s). Each call takes "
                "the place of a session. Set timeouts in this function.",
                self._num_left,
                getattr(function, "__qualname__", repr(function)),
            )


BLOCKED_S = 5.0
"""A loop that does not turn for this long is blocked. Only time counts in which its thread computes or waits:
a thread that other processes keep from a core does not block the loop, the machine does."""

LOOK_S = 0.1
"""Seconds between two looks. A look counts no more than this, however late it is: what delays the thread that
looks also delays the thread of the loop, for example a third thread that has the GIL and waits for a core."""

_STEP = asyncio.Handle._run.__code__


def log_blocks(num_sessions: Callable[[], int]) -> AbstractContextManager[None]:
    """Log once per block of the running loop where it is blocked, and how many sessions wait."""

    def log_block(frame: FrameType) -> None:
        log.warning(
            "%s has blocked the event loop for %g s, and the %d sessions of this worker wait: await "
            "slow calls in this function, or remove `async`, so that the function runs in a thread",
            place_of_step(frame),
            BLOCKED_S,
            num_sessions(),
        )

    return watch_for_blocks(log_block)


@contextmanager
def watch_for_blocks(on_block: Callable[[FrameType], None]) -> Iterator[None]:
    """Call `on_block` once per block of the running loop, in another thread, with the frame of the loop's."""
    loop = asyncio.get_running_loop()
    thread = threading.get_ident()
    number = threading.get_native_id()
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            has_turned = threading.Event()
            began = read_schedule(number)
            loop.call_soon_threadsafe(has_turned.set)
            for num_looks in count(1):
                if is_over.wait(LOOK_S) or has_turned.is_set():
                    break
                if _measure_stay(began, read_schedule(number), num_looks) >= BLOCKED_S:
                    on_block(sys._current_frames()[thread])
                    while not (is_over.wait(LOOK_S) or has_turned.is_set()):
                        pass
                    break

    watching = threading.Thread(target=watch, name="loop-watch", daemon=True)
    watching.start()
    try:
        yield
    finally:
        is_over.set()
        watching.join()


class _Schedule(NamedTuple):
    """Whether a thread has a core or is in the queue for one, and its seconds with a core and in the queue so
    far."""

    is_queued: bool
    computed_s: float
    queued_s: float


def _measure_stay(began: _Schedule, now: _Schedule, num_looks: int) -> float:
    """Seconds for which a thread has computed or waited since `began`, after this number of looks."""
    computed_s = now.computed_s - began.computed_s
    queued_s = now.queued_s - began.queued_s
    # a wait in the queue counts as such when it has ended; looks are few while a C function has the GIL
    return computed_s if now.is_queued else max(computed_s, num_looks * LOOK_S - queued_s)


def read_schedule(number: int) -> _Schedule:
    """Schedule of the thread with this number. Only Linux tells it: elsewhere only looks count."""
    folder = Path(f"/proc/self/task/{number}")
    try:
        # the state first: the times are complete for a thread that was in no queue before they were read
        state = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        computed, queued, _ = (folder / "schedstat").read_text(encoding="utf-8").split()
    except OSError:
        return _Schedule(False, 0.0, 0.0)
    return _Schedule(state == "R", int(computed) / 1e9, int(queued) / 1e9)


def place_of_step(innermost: FrameType) -> str:
    """File, line and function in which a step of the loop is: the innermost that are the user's own."""
    frames: list[FrameType] = []
    for frame, _ in walk_stack(innermost):
        if frame.f_code is _STEP:
            break
        frames.append(frame)
    own = [frame for frame in frames if is_own(frame.f_code.co_filename)]
    named = (own or frames or [innermost])[0]
    code = named.f_code
    return f"{code.co_filename}:{named.f_lineno} ({code.co_qualname})"
