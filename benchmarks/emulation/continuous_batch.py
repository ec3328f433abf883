"""A timing model of continuous batching: requests that decode together, at a pace that follows the batch.

Pure: the caller passes the time. Prompts are prefilled one after the other while decoding stands still;
then every running request gets one token per step. Between two events the pace is taken as linear in the
context.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import Protocol

_EPSILON = 1e-6
"""Tolerance for rounding, in steps and in seconds."""


class DevicePace(Protocol):
    """Seconds that a device takes."""

    def prefill_s(self, num_tokens: int) -> float: ...

    def decode_s(self, num_running: int, context: float) -> float:
        """One token for each of `num_running` requests that hold `context` tokens together."""
        ...


@dataclass(frozen=True, slots=True)
class ConstantDelay:
    """One token per delay for every request, however many there are; prompts cost nothing."""

    token_delay_s: float

    def prefill_s(self, num_tokens: int) -> float:
        return 0.0

    def decode_s(self, num_running: int, context: float) -> float:
        return self.token_delay_s


@dataclass(eq=False, slots=True)
class Slot:
    """One request in the batch."""

    name: str
    num_prompt: int
    num_wanted: int
    """Tokens to sample."""
    report_every: int
    """The request is due at every multiple of so many tokens, and at its end."""
    num_cached: int = 0
    """Tokens of its prompt that need no prefill."""
    started: float | None = None
    """Step at which its prefill ended; None until then."""
    has_left: bool = False


class ContinuousBatch:
    def __init__(self, pace: DevicePace) -> None:
        self._pace = pace
        self._steps = 0.0
        self._prefills: deque[tuple[Slot | None, float]] = deque()
        """Requests that wait for prefill, and the seconds each still takes; None: all KV is recomputed."""
        self._due: list[tuple[float, int, Slot]] = []
        """Heap of the steps at which requests are due; entries of requests that left are skipped."""
        self._order = count()
        self._num_running = 0
        self._context = 0.0
        """Tokens of context of the running requests as of step 0: the sum of prompt - started."""

    def join(
        self,
        name: str,
        num_prompt: int,
        num_wanted: int,
        report_every: int | None = None,
        *,
        num_cached: int = 0,
    ) -> Slot:
        """Add a request; `num_cached` prompt tokens need no prefill. By default it is due at its end only."""
        slot = Slot(name, num_prompt, num_wanted, report_every or num_wanted, num_cached)
        self._prefills.append((slot, self._pace.prefill_s(num_prompt - num_cached)))
        return slot

    def leave(self, slot: Slot) -> None:
        """Remove a request. No effect on one that has ended."""
        if slot.has_left:
            return
        slot.has_left = True
        if slot.started is not None:
            self._num_running -= 1
            self._context -= slot.num_prompt - slot.started

    @property
    def context(self) -> int:
        """Tokens that the running requests hold together."""
        return round(self._context + self._num_running * self._steps)

    def recompute(self) -> None:
        """Recompute the KV of the running requests, as one more prefill."""
        self._prefills.appendleft((None, self._pace.prefill_s(self.context)))

    def num_sampled(self, slot: Slot) -> int:
        if slot.started is None:
            return 0
        return min(slot.num_wanted, int(self._steps - slot.started + _EPSILON))

    def next_due_s(self) -> float | None:
        """Seconds until the next event, if no request joins or leaves; None if there is none."""
        self._forget_the_left()
        if self._prefills:
            return self._prefills[0][1]
        return self._seconds_for(self._due[0][0] - self._steps) if self._due else None

    def advance(self, seconds: float) -> list[Slot]:
        """Let time pass; returns the requests that were due, in order. Those that ended have left."""
        due: list[Slot] = []
        while (needed := self.next_due_s()) is not None:
            if needed > seconds + _EPSILON:
                self._pass(seconds)
                break
            seconds -= min(needed, seconds)
            if self._prefills:
                slot, _ = self._prefills.popleft()
                if slot is not None:
                    self._begin(slot)
            else:
                due.append(self._reach_next())
        return due

    def _pass(self, seconds: float) -> None:
        """Let time pass in which nothing is due."""
        if self._prefills:
            slot, needed = self._prefills[0]
            self._prefills[0] = (slot, needed - seconds)
        else:
            self._steps += self._steps_in(seconds)

    def _begin(self, slot: Slot) -> None:
        slot.started = self._steps
        self._num_running += 1
        self._context += slot.num_prompt - slot.started
        self._expect(slot)

    def _reach_next(self) -> Slot:
        step, _, slot = heappop(self._due)
        self._steps = max(self._steps, step)
        if self.num_sampled(slot) == slot.num_wanted:
            self.leave(slot)
        else:
            self._expect(slot)
        return slot

    def _expect(self, slot: Slot) -> None:
        assert slot.started is not None
        num_tokens = min(self.num_sampled(slot) + slot.report_every, slot.num_wanted)
        heappush(self._due, (slot.started + num_tokens, next(self._order), slot))

    def _forget_the_left(self) -> None:
        while self._prefills and self._prefills[0][0] is not None and self._prefills[0][0].has_left:
            self._prefills.popleft()
        while self._due and self._due[0][2].has_left:
            heappop(self._due)

    def _seconds_for(self, steps: float) -> float:
        """Integral of the pace over so many steps: a n + b n^2 / 2."""
        now, growth = self._pace_now()
        return now * steps + growth * steps * steps / 2

    def _steps_in(self, seconds: float) -> float:
        """Inverse of `_seconds_for`."""
        now, growth = self._pace_now()
        if growth * seconds < 1e-9 * now * now:
            return seconds / now
        return (math.sqrt(now * now + 2 * growth * seconds) - now) / growth

    def _pace_now(self) -> tuple[float, float]:
        """Seconds of a step now, and how many more the next one takes, with one more token per request."""
        running = self._num_running
        context = self._context + self._num_running * self._steps
        now = self._pace.decode_s(running, context)
        return now, self._pace.decode_s(running, context + running) - now
