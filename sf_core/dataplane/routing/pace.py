"""When the readers of streams look for new tokens: how many events a run sends is bounded, however much it
samples.

An event costs the same for one token as for ten. Few streams get every token as it comes; many get the tokens
of several steps of their engine in one event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

EVENT_S = 1 / 8000
"""What each event takes of a round: 8 streams have an event per millisecond, 256 one in 32 ms each."""


class Pace:
    """Wakes readers in rounds. The next round begins at once, but not before the last one's events have had
    their time: as long as they are fewer, nobody waits."""

    def __init__(self, event_s: float = EVENT_S) -> None:
        self._event_s = event_s
        self._due: list[Callable[[], None]] = []
        self._next_at = 0.0

    def soon(self, wake: Callable[[], None]) -> None:
        """Call it in the next round."""
        if not self._due:
            loop = asyncio.get_running_loop()
            if loop.time() < self._next_at:
                loop.call_at(self._next_at, self._round)
            else:
                loop.call_soon(self._round)
        self._due.append(wake)

    def _round(self) -> None:
        due, self._due = self._due, []
        self._next_at = asyncio.get_running_loop().time() + self._event_s * len(due)
        for wake in due:
            wake()
