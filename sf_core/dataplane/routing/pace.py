"""Pacing of streams: a bound on the events that a run sends per second, however much it samples.

An event costs the same for one token as for ten. While streams are few, every token is sent as it comes; when
they are many, one event carries the tokens of several engine steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

EVENT_S = 1 / 8000
"""Seconds that each event adds to a round: 8 streams have an event per millisecond, 256 one in 32 ms each."""


class StreamPace:
    """Wakes the readers of streams in rounds. A round begins at once, but at the earliest `event_s` per event
    after the previous round began: a few streams never wait."""

    def __init__(self, event_s: float = EVENT_S) -> None:
        self._event_s = event_s
        self._due: list[Callable[[], None]] = []
        self._next_at = 0.0

    def wake_in_next_round(self, wake: Callable[[], None]) -> None:
        """Call `wake` in the next round."""
        if not self._due:
            loop = asyncio.get_running_loop()
            if loop.time() < self._next_at:
                loop.call_at(self._next_at, self._run_round)
            else:
                loop.call_soon(self._run_round)
        self._due.append(wake)

    def _run_round(self) -> None:
        due = self._due
        self._due = []
        self._next_at = asyncio.get_running_loop().time() + self._event_s * len(due)
        for wake in due:
            wake()
