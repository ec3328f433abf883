"""Advantages of sessions by the names that `train.advantage` gives them. Pure: arrays in, arrays out."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from sf_core.recipes.rewards import are_equal

EPSILON = 1e-6


class Advantage(Protocol):
    def __call__(
        self, rewards: npt.ArrayLike, groups: npt.ArrayLike, *, scale: bool
    ) -> npt.NDArray[np.float32]:
        """The advantage of each session [N], from its reward [N] and the label of its group [N]. `scale` is
        `train.scale_rewards`."""
        ...


def group_relative(
    rewards: npt.ArrayLike, groups: npt.ArrayLike, *, scale: bool = True
) -> npt.NDArray[np.float32]:
    """Reward of each session minus the mean of its group, divided by the group's standard deviation.

    `groups` [N] holds any labels, equal within a group. With scale=False only the mean is subtracted
    (Dr. GRPO, Liu et al. 2025); with scaling this is GRPO (Shao et al. 2024). A reward that equals
    the mean (sf_core/recipes/rewards.py) gives zero.

    >>> group_relative([1.0, 0.0, 5.0, 5.0], ["a", "a", "b", "b"]).round(3).tolist()
    [1.0, -1.0, 0.0, 0.0]
    >>> group_relative([1.0, 0.0, 5.0], [7, 7, 8], scale=False).tolist()
    [0.5, -0.5, 0.0]
    """
    values = np.asarray(rewards, dtype=np.float64)
    _, group = np.unique(np.asarray(groups), return_inverse=True)
    sizes = np.bincount(group)
    mean = (np.bincount(group, weights=values) / sizes)[group]
    # rounding leaves tiny differences between equal rewards, which must not be scaled up
    is_mean = are_equal(np.minimum(values, mean), np.maximum(values, mean))
    centred = np.where(is_mean, 0.0, values - mean)
    if scale:
        deviation = np.sqrt(np.bincount(group, weights=centred**2) / sizes)
        centred /= deviation[group] + EPSILON
    return centred.astype(np.float32)


ADVANTAGES: dict[str, Advantage] = {"group_relative": group_relative}
