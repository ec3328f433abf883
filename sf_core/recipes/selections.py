"""Selections: which sessions of a batch train. What `train.select` names. Pure.

The others stay in the batch with the reason why they do not train, and no statistic counts them.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from sf_core.recipes.samples import Samples
from sf_core.settings import Settings, or_kind


class Extremes(Settings):
    """Trains on the sessions with the highest and the lowest rewards of each group: half of `keep` from each
    end (down-sampling of rollouts; PODS, Xu et al. 2025; Sol-RL, arXiv 2604.06916). Among sessions with equal
    rewards, an earlier session counts as lower. A group with at most `keep` sessions is used whole."""

    kind: Literal["extremes"] = "extremes"
    keep: int = Field(ge=2, multiple_of=2)
    """Number of sessions of each group that are used for training. The number must be even and less than
    `rollout.group_size`."""

    reason: ClassVar[str] = "not_extreme"
    """Reason why the other sessions do not train. The reason is stored with the batch."""

    def __call__(self, samples: Samples) -> npt.NDArray[np.bool_]:
        """[S] whether each session trains."""
        places = np.arange(len(samples.groups))
        half = self.keep // 2
        order = np.lexsort((places, samples.rewards, samples.groups))
        ranks = np.empty_like(places)
        # of each session among those of its group, from the lowest reward
        ranks[order] = places - np.searchsorted(samples.groups[order], samples.groups[order])
        return (ranks < half) | (ranks >= samples.group_size - half)


AnySelection = Annotated[Extremes, or_kind("extremes")]
