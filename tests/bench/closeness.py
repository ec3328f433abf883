"""Tolerances of computed numbers, in roundings: an absolute tolerance is too tight for large numbers and too
loose for small ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

FORWARD = 64
BACKWARD = 1024
"""Roundings that a pass through a tiny network may cost in float32: of a log-prob, and of a gradient, which
is a sum of numbers of both signs. tests/test_closeness.py measures the cost against float64."""
SMALLEST_SHARE = 1e-3
"""A gradient that is smaller than this share of the largest one is a difference of larger numbers."""


def assert_rounded(
    found: Any,
    exact: Any,
    roundings: float,
    *,
    scale: Any = None,
    dtype: torch.dtype = torch.float32,
    what: str = "",
) -> None:
    """Assert that `found` differs from `exact` by at most so many roundings of the largest number that is
    computed with. `scale`: the size of this number, for all elements or for each; by default the largest of
    `exact`. `dtype`: the type in which `found` was computed."""
    one = as_float64(found)
    other = as_float64(exact)
    assert one.shape == other.shape, (what, one.shape, other.shape)
    size = np.abs(other).max(initial=0.0) if scale is None else as_float64(scale)
    kind = torch.finfo(dtype)
    # below the smallest normal number, places do not get smaller
    bound = roundings * kind.eps * np.maximum(size, kind.tiny)
    with np.errstate(invalid="ignore"):
        excess = np.abs(one - other) - bound
    wrong = ~((excess <= 0) | (one == other) | (np.isnan(one) & np.isnan(other)))
    if wrong.any():
        # what is no number is the worst
        worst = int(np.where(wrong, np.nan_to_num(excess, nan=np.inf), -np.inf).argmax())
        here, wanted, allowed = (np.broadcast_to(v, one.shape).flat[worst] for v in (one, other, bound))
        raise AssertionError(
            f"{what or 'a number'} is {here:.9g} instead of {wanted:.9g} at index {worst}, "
            f"and may differ by {allowed:.3g}, which is {roundings:g} roundings of {dtype}"
        )


def assert_gradients(
    found: Mapping[str, Any],
    exact: Mapping[str, Any],
    roundings: float = BACKWARD,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Assert the same of gradients by parameter, in roundings of the largest element of each."""
    sizes = {name: np.abs(as_float64(gradient)).max(initial=0.0) for name, gradient in exact.items()}
    least = SMALLEST_SHARE * max(sizes.values(), default=0.0)
    for name, gradient in exact.items():
        scale = max(sizes[name], least)
        assert_rounded(found[name], gradient, roundings, scale=scale, dtype=dtype, what=name)


def as_float64(values: Any) -> npt.NDArray[np.float64]:
    if isinstance(values, torch.Tensor):
        values = values.detach().double().cpu().numpy()
    return np.asarray(values, np.float64)
