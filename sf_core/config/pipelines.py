"""The pipelines of the SeamlessFlow paper (Figure 4), each a choice of two things: whether trainers roll out
between train steps, and whether sampling continues while they train. plan.py assigns the workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PipelineName = Literal["colocated", "disaggregated", "async", "multiplexed"]


@dataclass(frozen=True, slots=True)
class Pipeline:
    lent: bool | None
    """True: trainers roll out between train steps. False: trainers only train. None: the tags of the workers
    decide."""
    overlap: tuple[bool, ...]
    """Allowed values of `rollout.overlap`. The first value is the default."""


PIPELINES: dict[PipelineName | None, Pipeline] = {
    # every device trains and rolls out in turn; with overlap, sessions continue after a train step
    "colocated": Pipeline(lent=True, overlap=(False, True)),
    # each side waits for the other
    "disaggregated": Pipeline(lent=False, overlap=(False,)),
    # rollout runs ahead, trainers wait for batches
    "async": Pipeline(lent=False, overlap=(True,)),
    # rollout runs ahead, and trainers help it while they wait
    "multiplexed": Pipeline(lent=True, overlap=(True,)),
    # tags and `rollout.overlap` decide
    None: Pipeline(lent=None, overlap=(True, False)),
}
