"""The queue of generations that no engine works on, in order of arrival, and the limits of waiting; and the
requests in it that may have ended an engine.

A generation that comes back from an engine gets its old position.

If an engine ends without a command, any request that got no token there may be the cause. These requests are
suspects. They go out again in two halves, and an engine that tries a half is given nothing else until each of
its requests has got a token, which clears it. So of n requests, the one that ends every engine is alone after
log2(n) + 1 deaths.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from sf_core.dataplane.routing.connection import EngineConnection
from sf_core.dataplane.routing.generation import Generation, Suspicion

MAX_FAULTS = 2
"""Number of engines that may end because of one request. More than 1, because an engine may also end by
chance."""


def mark_suspects(generations: Sequence[Generation], worker: str) -> None:
    """Suspect these requests of having ended the engine of a worker. A single request is blamed at once."""
    if len(generations) == 1:
        generations[0].num_faults += 1
    middle = (len(generations) + 1) // 2
    for half in (generations[:middle], generations[middle:]):
        earlier = (suspected.suspicion.workers for suspected in half if suspected.suspicion is not None)
        suspicion = Suspicion(frozenset({worker}).union(*earlier))
        for generation in half:
            generation.suspicion = suspicion


def assign_trials(
    waiting: Iterable[Generation], engines: Iterable[EngineConnection]
) -> dict[EngineConnection, Suspicion]:
    """The suspects of each engine that tries some, or will try some as soon as all its requests have got a
    token. One engine remains for other requests, unless it is the only one."""
    engines = [engine for engine in engines if engine.is_routable]
    max_trying = max(1, len(engines) - 1)
    tried = {engine: engine.suspects_on_trial for engine in engines if engine.suspects_on_trial is not None}
    for suspicion, floor in _list_untried(waiting, tried.values()):
        free = [engine for engine in engines if engine not in tried and engine.has_version(floor)]
        if free and len(tried) < max_trying:
            fittest = min(free, key=lambda engine: _unfitness(engine, suspicion))
            tried[fittest] = suspicion
    return tried


def _list_untried(
    waiting: Iterable[Generation], tried: Iterable[Suspicion]
) -> Iterator[tuple[Suspicion, int]]:
    """The suspects that no engine tries, each with the oldest policy version that can try them."""
    floors: dict[Suspicion, int] = {}
    for generation in waiting:
        if (suspicion := generation.suspicion) is not None and suspicion not in tried:
            floors[suspicion] = min(generation.floor, floors.get(suspicion, generation.floor))
    yield from floors.items()


def _unfitness(engine: EngineConnection, suspicion: Suspicion) -> tuple[bool, bool, int]:
    """Sort key: an engine of another worker first, then one with room, then the one with fewest new
    requests."""
    return engine.worker in suspicion.workers, not engine.has_room, len(engine.without_token)


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
