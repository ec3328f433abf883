"""The queue of generations that no engine works on, in order of arrival, and the limits of waiting.

Owns the order: a generation that comes back from an engine takes its old place.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

from sf_core.dataplane.routing.generation import Generation

_ARRIVAL = attrgetter("arrival")


@dataclass(frozen=True)
class Limits:
    max_waiting: int
    """Requests beyond this many are refused."""
    patience_s: float
    """A request that no engine took for this long is refused."""
    engine_silence_s: float
    """An engine that says nothing for this long while it has work is dropped."""


class WaitQueue:
    def __init__(self) -> None:
        self._line: list[Generation] = []
        self._numbers = itertools.count()
        self._suspects: set[Generation] = set()

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Generation]:
        return iter(self._line)

    def join(self, generation: Generation) -> None:
        """Queue a generation: at the end the first time, at its old place when it comes back."""
        if generation.arrival is None:
            generation.arrival = next(self._numbers)
        generation.waiting_since = time.monotonic()
        insort(self._line, generation, key=_ARRIVAL)
        if generation.suspicion is not None:
            self._suspects.add(generation)

    def leave(self, generation: Generation) -> None:
        """Remove a generation; no effect if it does not wait."""
        if generation.arrival is None:
            return
        place = bisect_left(self._line, generation.arrival, key=_ARRIVAL)
        if place < len(self._line) and self._line[place] is generation:
            del self._line[place]
            self._suspects.discard(generation)

    @property
    def suspects(self) -> list[Generation]:
        """Those that may have ended an engine, in order."""
        return sorted(self._suspects, key=_ARRIVAL) if self._suspects else []

    def keep(self, passed_over: list[Generation], num_seen: int) -> None:
        """Replace the first `num_seen` generations by those passed over, which go on waiting."""
        if self._suspects:
            self._suspects.difference_update({*self._line[:num_seen]}.difference(passed_over))
        self._line[:num_seen] = passed_over
