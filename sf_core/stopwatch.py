"""Durations that no change of the computer's clock makes wrong."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


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
