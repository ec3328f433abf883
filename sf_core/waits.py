"""Waits that are logged and shown: for what, since when, until when. All that may wait long uses them.

A stopwatch measures durations that no change of the computer's clock makes wrong.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """Runs from its making. A change of the clock meanwhile changes neither the duration nor the order of its
    times."""

    since: float = field(default_factory=time.time)
    """Unix seconds."""
    _started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    @property
    def now(self) -> float:
        """Unix seconds by the clock as it was at the start."""
        return self.since + self.seconds


Window = tuple[float, float]
"""Start and end in Unix seconds."""


def in_order(start: float, end: float) -> Window:
    """Two stored times as a window. Two processes, or two machines, may have had different clocks: an end
    before the start becomes a window of no length."""
    return start, max(start, end)


def rate(amount: float, seconds: float) -> float | None:
    """Amount per second; None, which means not known, for a time of no length."""
    return amount / seconds if seconds > 0 else None


log = logging.getLogger(__name__)

FIRST_S = 30.0
"""Seconds after which a wait is first logged."""
THEN_S = 300.0
"""Seconds between later log lines of the same wait."""

SHORTEST_S = 0.02
"""Shorter waits are left out of manifests."""

_current: list[Wait] = []
"""Waits of this process that are under way."""

_finished: ContextVar[list[dict[str, Any]] | None] = ContextVar("finished waits", default=None)


Facts = dict[str, Any]
"""A wait as JSON: what, since and until; the times in Unix seconds."""


@dataclass
class Wait:
    """One wait under way."""

    what: str
    timeout_s: float
    reason: Callable[[], str] | str = ""
    """What delays it, if that is known; may be set during the wait."""
    since: float = field(default_factory=time.time)
    """Unix seconds."""
    _started: float = field(default_factory=time.monotonic, repr=False)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    @property
    def left_s(self) -> float:
        return max(0.0, self.timeout_s - self.seconds)

    @property
    def until(self) -> float:
        return self.since + self.timeout_s

    def check(self) -> None:
        """Raises TimeoutError once the deadline has passed."""
        if self.seconds >= self.timeout_s:
            raise self.over()

    def over(self) -> TimeoutError:
        return TimeoutError(f"waited {self.seconds:.0f} s, since {clock(self.since)}, for {self.describe()}")

    def sentence(self) -> str:
        return f"waiting since {clock(self.since)}, until {clock(self.until)}, for {self.describe()}"

    def facts(self) -> Facts:
        return {"what": self.describe(), "since": self.since, "until": self.until}

    def describe(self) -> str:
        """What is waited for, and the reason why it is not there yet."""
        reason = self.reason() if callable(self.reason) else self.reason
        return f"{self.what}: {reason}" if reason else self.what


Tell = Callable[[Wait], None]


@contextmanager
def waiting_for(
    what: str,
    timeout_s: float,
    *,
    reason: Callable[[], str] | str = "",
    tell: Tell | None = None,
) -> Iterator[Wait]:
    """Log what is waited for after FIRST_S and every THEN_S from then on; `tell` is called with the wait at
    the same moments. Neither `tell` nor `reason` may take long.

    The caller keeps the deadline, by `check` between polls or by raising `over` when its own call times out.
    """
    wait = Wait(what, timeout_s, reason)
    is_over = threading.Event()
    # Prefect finds the run of a log line by the context
    watch = partial(copy_context().run, _watch, wait, is_over, tell)
    watcher = threading.Thread(target=watch, name="wait", daemon=True)
    watcher.start()
    _current.append(wait)
    try:
        yield wait
    finally:
        is_over.set()
        _current[:] = [other for other in _current if other is not wait]
        watcher.join()
        finished = _finished.get()
        if finished is not None and wait.seconds >= SHORTEST_S:
            finished.append({"what": what, "start": wait.since, "end": wait.since + wait.seconds})


def long_waits() -> list[Wait]:
    """Waits under way that have lasted long enough to be logged."""
    return [wait for wait in list(_current) if wait.seconds >= FIRST_S]


@contextmanager
def collect_waits() -> Iterator[list[dict[str, Any]]]:
    """Yields a list of the waits that end inside: what, and start and end in Unix seconds."""
    waits: list[dict[str, Any]] = []
    token = _finished.set(waits)
    try:
        yield waits
    finally:
        _finished.reset(token)


def _watch(wait: Wait, is_over: threading.Event, tell: Tell | None) -> None:
    pause_s = FIRST_S
    while not is_over.wait(pause_s):
        log.warning(wait.sentence())
        if tell is not None:
            tell(wait)
        pause_s = THEN_S


def clock(moment: float) -> str:
    """Local time of day of Unix seconds."""
    return time.strftime("%H:%M:%S", time.localtime(moment))
