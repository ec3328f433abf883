"""Runs plain functions beside an event loop, each call in a thread of its own.

A pool would do worse: calls that hang in it keep others waiting, and the process waits for them at its end.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from typing import Any

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
