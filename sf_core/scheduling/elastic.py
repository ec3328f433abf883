"""How many workers run agents or score answers. Facts in, number out: no clock, no IO."""

from __future__ import annotations

import math
from collections import deque

from sf_core.config import RunnersConfig


class Elastic:
    """So many as the sessions need, within bounds:

        needed = ceil(sessions that are run or wait / sessions of one worker)
        wanted = most that were needed within the last `idle_s`, at least `min`, at most `max`

    So it grows at once and shrinks only after `idle_s`: a queue that comes and goes starts nothing anew.
    """

    def __init__(self, bounds: RunnersConfig, concurrency: int) -> None:
        self._bounds, self._concurrency = bounds, concurrency
        self._needed: deque[tuple[float, int]] = deque()
        """When so many were needed; falling, because earlier ones that were fewer decide nothing."""

    @property
    def at_least(self) -> int:
        return self._bounds.min

    def wanted(self, now_s: float, num_sessions: int) -> int:
        """Asked now and then, with a time that never decreases."""
        needed = math.ceil(num_sessions / self._concurrency)
        while self._needed and self._needed[-1][1] <= needed:
            self._needed.pop()
        self._needed.append((now_s, needed))
        while self._needed[0][0] < now_s - self._bounds.idle_s:
            self._needed.popleft()
        most = self._needed[0][1]
        return min(max(most, self._bounds.min), self._bounds.max)
