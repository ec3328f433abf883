"""How many workers should run agents or score answers. Facts in, number out: no clock, no IO."""

from __future__ import annotations

import math
from collections import deque

from sf_core.config import RunnersConfig


class Elastic:
    """Number of workers that the sessions need, within bounds:

        needed = ceil(running and waiting sessions / sessions per worker)
        wanted = maximum of needed within the last `idle_s`, at least `min`, at most `max`

    So the number grows at once and shrinks only after `idle_s`: a queue that comes and goes restarts nothing.
    """

    def __init__(self, bounds: RunnersConfig, concurrency: int) -> None:
        self._bounds, self._concurrency = bounds, concurrency
        self._needed: deque[tuple[float, int]] = deque()
        """Times and the numbers needed then; falling, because an earlier, smaller number decides nothing."""

    def count_wanted(self, now_s: float, num_sessions: int) -> int:
        """Number of workers wanted now; `now_s` must not decrease between calls."""
        needed = math.ceil(num_sessions / self._concurrency)
        while self._needed and self._needed[-1][1] <= needed:
            self._needed.pop()
        self._needed.append((now_s, needed))
        while self._needed[0][0] < now_s - self._bounds.idle_s:
            self._needed.popleft()
        return min(max(self._needed[0][1], self._bounds.min), self._bounds.max)
