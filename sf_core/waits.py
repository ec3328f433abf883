"""Waiting that is seen: for what, since when, until when. Everything that may wait long does it in here."""

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

log = logging.getLogger(__name__)

FIRST_S = 30.0
"""A wait is told of when it has lasted this long,"""
THEN_S = 300.0
"""and again this often."""

SHORTEST_S = 0.02
"""Shorter waits are not worth a line in a manifest."""

_current: list[Wait] = []
"""Of this process."""

_finished: ContextVar[list[dict[str, Any]] | None] = ContextVar("finished waits", default=None)


Facts = dict[str, Any]
"""Of a wait: what, since and until, in Unix seconds. JSON."""


@dataclass
class Wait:
    """Something that is being waited for."""

    what: str
    timeout_s: float
    reason: Callable[[], str] | str = ""
    """What holds it up, if that is known; may be set while it lasts."""
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
        """What it waits for, and why that is not there."""
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
    """Log what is waited for, once the wait has lasted a while and now and then after that; `tell` gets the
    wait at the same moments. Neither it nor `reason` may take long.

    The deadline is the caller's to keep: by `check` between polls, or by raising `over` when what it calls
    has timed out.
    """
    wait = Wait(what, timeout_s, reason)
    is_over = threading.Event()
    # Prefect finds the run a line of the log belongs to by the context
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
    """What this process waits for now and was told of."""
    return [wait for wait in list(_current) if wait.seconds >= FIRST_S]


@contextmanager
def collect_waits() -> Iterator[list[dict[str, Any]]]:
    """The waits that end inside, as what, start and end in Unix seconds."""
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
    """Of Unix seconds, as people are told them."""
    return time.strftime("%H:%M:%S", time.localtime(moment))
