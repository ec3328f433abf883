"""The queue of generations that no engine works on, in order of arrival, and the limits of waiting.

Owns the order: a generation that comes back from an engine gets its old position.
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
class QueueLimits:
    max_waiting: int
    """Further requests are refused."""
    patience_s: float
    """Seconds after which a request that no engine has accepted is refused."""
    engine_silence_s: float
    """Seconds of silence after which an engine that has work is dropped."""


class WaitQueue:
    def __init__(self) -> None:
        self._queue: list[Generation] = []
        self._arrival_numbers = itertools.count()
        self._suspects: set[Generation] = set()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Generation]:
        return iter(self._queue)

    def push(self, generation: Generation) -> None:
        """Queue a generation: at the end the first time, at its old position when it comes back."""
        if generation.arrival is None:
            generation.arrival = next(self._arrival_numbers)
        generation.waiting_since = time.monotonic()
        insort(self._queue, generation, key=_ARRIVAL)
        if generation.suspicion is not None:
            self._suspects.add(generation)

    def remove(self, generation: Generation) -> None:
        """Remove a generation. No effect if it is not in the queue."""
        if generation.arrival is None:
            return
        index = bisect_left(self._queue, generation.arrival, key=_ARRIVAL)
        if index < len(self._queue) and self._queue[index] is generation:
            del self._queue[index]
            self._suspects.discard(generation)

    @property
    def suspects(self) -> list[Generation]:
        """Waiting generations that may have ended an engine, in order."""
        return sorted(self._suspects, key=_ARRIVAL) if self._suspects else []

    def retain_passed_over(self, passed_over: list[Generation], num_seen: int) -> None:
        """Remove the first `num_seen` generations, except those that were passed over."""
        if self._suspects:
            removed = {*self._queue[:num_seen]}.difference(passed_over)
            self._suspects.difference_update(removed)
        self._queue[:num_seen] = passed_over
