"""Discrete-event clock: time jumps from event to event. Processes are generators that yield their waits."""

from __future__ import annotations

from collections.abc import Callable, Generator
from heapq import heappop, heappush
from itertools import count
from typing import Any


class Signal:
    """Something that processes wait for until `EventClock.give` wakes them."""

    def __init__(self) -> None:
        self.waiting: list[Process] = []


Process = Generator[float | Signal, None, None]
"""Generator that yields seconds to sleep, or a signal to wait for."""


class EventClock:
    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the start."""
        self.on_pass: Callable[[float, float], None] = lambda start, end: None
        """Called when time goes on, with the moments between which nothing happens."""
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()

    def after(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        heappush(self._events, (self.now + seconds, next(self._order), action, arguments))

    def start(self, process: Process) -> None:
        self.after(0.0, self._resume, process)

    def give(self, signal: Signal) -> None:
        """Wake all processes that wait for the signal now."""
        waiting = signal.waiting
        signal.waiting = []
        for process in waiting:
            self.start(process)

    def run(self, is_over: Callable[[], bool]) -> None:
        """Run events until `is_over()`. Raises RuntimeError if no event is left before that."""
        while not is_over():
            if not self._events:
                raise RuntimeError(f"at {self.now:.3f} s everyone waits, and nothing will happen")
            moment, _, action, arguments = heappop(self._events)
            if moment > self.now:
                self.on_pass(self.now, moment)
            self.now = moment
            action(*arguments)

    def _resume(self, process: Process) -> None:
        try:
            waits_for = next(process)
        except StopIteration:
            return
        if isinstance(waits_for, Signal):
            waits_for.waiting.append(process)
        else:
            self.after(waits_for, self._resume, process)
