"""Means over seeds and their 95 % intervals, by Student's t. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over runs that differ in their seeds alone."""

    value: float
    half: float | None
    """Half the length of the 95 % interval of the mean; None for a single run, which tells no spread."""
    count: int

    @classmethod
    def over(cls, values: Sequence[float]) -> Mean | None:
        """None without values."""
        if not values:
            return None
        half = None
        if len(values) > 1:
            error = statistics.stdev(values) / math.sqrt(len(values))
            half = t_quantile(len(values) - 1) * error
        return cls(statistics.fmean(values), half, len(values))

    def interval(self, least: float = -math.inf) -> tuple[float, float] | None:
        """The 95 % interval; `least` is the smallest value that there can be."""
        return None if self.half is None else (max(least, self.value - self.half), self.value + self.half)


@cache
def t_quantile(degrees: int) -> float:
    """How many standard errors the 95 % interval reaches to each side, with so many degrees of freedom.

    >>> round(t_quantile(2), 3)
    4.303
    """
    low = 0.0
    high = 16.0
    # the largest one is that of one degree, 12.7
    for _ in range(60):
        middle = (low + high) / 2
        if share_within(middle, degrees) < CONFIDENCE:
            low = middle
        else:
            high = middle
    return high


def share_within(t: float, degrees: int) -> float:
    """Probability that a variable with Student's t distribution is between -t and t: the finite sums of
    Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan2(t, math.sqrt(degrees))
    square = math.cos(angle) ** 2
    is_odd = degrees % 2 == 1
    term = math.cos(angle) if is_odd else 1.0
    total = term if degrees > 1 else 0.0
    for power in range(2 + is_odd, degrees - 1, 2):
        term *= square * (power - 1) / power
        total += term
    if is_odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total
