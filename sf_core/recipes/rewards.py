"""Equality of rewards up to rounding."""

from __future__ import annotations

from typing import Any

import numpy as np

RELATIVE = 1e-9
ABSOLUTE = 1e-9
"""Parts of a reward that add up to no more than 10^5 in magnitude give the same float64 sum within this, in
whatever order they are added. So small a difference is never meant."""


def are_equal(lowest: Any, highest: Any) -> Any:
    """Whether rewards differ by rounding only, from the lowest and the highest of them; floats or arrays [N].

    >>> are_equal(0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1), are_equal(0.0, 1e-6)
    (True, False)
    """
    size = np.maximum(np.abs(lowest), np.abs(highest))
    equal = np.subtract(highest, lowest) <= ABSOLUTE + RELATIVE * size
    return equal if np.ndim(equal) else bool(equal)
