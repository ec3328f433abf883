"""Counter-based randomness: (key, counter) -> uniform, with no state to carry. Knows nothing of models."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def uniforms(keys: npt.ArrayLike, counters: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """One uniform in [0, 1) per pair of unsigned 64-bit key and non-negative counter, elementwise."""
    return (bits(keys, counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def bits(keys: npt.ArrayLike, counters: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    """64 random bits per pair of key and counter, elementwise.

    SplitMix64 (Steele, Lea and Flood 2014): the counter walks the Weyl sequence of a stream whose start is
    the mixed key, so neighbouring keys and neighbouring counters are both unrelated.
    """
    # At least one-dimensional: scalars warn where arrays wrap around.
    key = np.atleast_1d(np.asarray(keys, dtype=np.uint64))
    counter = np.atleast_1d(np.asarray(counters, dtype=np.uint64))
    return _mix(_mix(key) + (counter + np.uint64(1)) * _GOLDEN)


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
