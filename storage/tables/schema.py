"""The trajectory schema of docs/reference/trajectories.md: its columns, and one row of it as a dataclass.

Owns names and types. The column `iteration` is the partition: it is in the folder's name and not in the
file, because readers that see it in both places refuse the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from storage.media import ImageSpan

NOT_SAMPLED = -1
"""Policy version of a token that was not sampled; null in the file."""

TURN = pa.struct(
    [
        ("role", pa.string()),
        ("start", pa.int32()),
        ("end", pa.int32()),
        ("finish_reason", pa.string()),
        ("engine", pa.string()),
        ("temperature", pa.float32()),
        ("top_p", pa.float32()),
        ("top_k", pa.int32()),
        ("reward", pa.float64()),
    ]
)

PART = pa.struct([("name", pa.string()), ("value", pa.float64())])
"""A named part of a reward. No map: not every reader knows maps (docs/decisions/070)."""

SCHEMA = pa.schema(
    [
        ("run_id", pa.string()),
        ("policy", pa.string()),
        ("task_id", pa.string()),
        ("environment", pa.string()),
        ("group_id", pa.string()),
        ("session_id", pa.string()),
        ("branch_id", pa.string()),
        ("parent_branch_id", pa.string()),
        ("shared_prefix", pa.int32()),
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("logprobs", pa.list_(pa.float32())),
        ("policy_versions", pa.list_(pa.int32())),
        ("turns", pa.list_(TURN)),
        ("messages", pa.string()),
        ("tools", pa.string()),
        ("output", pa.string()),
        ("reward", pa.float64()),
        ("reward_parts", pa.list_(PART)),
        ("status", pa.string()),
        ("min_version", pa.int32()),
        ("max_version", pa.int32()),
        ("interruptions", pa.int32()),
        ("started_at", pa.timestamp("us", tz="UTC")),
        ("finished_at", pa.timestamp("us", tz="UTC")),
    ]
)

IMAGE = pa.struct(
    [
        ("sha256", pa.string()),
        ("start", pa.int32()),
        ("length", pa.int32()),
        ("height", pa.int32()),
        ("width", pa.int32()),
    ]
)

IMAGES = pa.field("images", pa.list_(IMAGE))
"""The column that the files of multimodal policies have too."""

MULTIMODAL_SCHEMA = SCHEMA.append(IMAGES)


class TurnSpan(NamedTuple):
    """Tokens start <= i < end of a trajectory, added by one message. Fields that only a sampled turn has are
    None otherwise."""

    role: str
    start: int
    end: int
    finish_reason: str | None = None
    engine: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    reward: float | None = None
    """What the turn earned by itself; None if nothing was said of it, and for the beginning of a turn."""


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One exported branch. The four arrays have one element per token.

    A token that was sampled but is trained in another branch has mask False and keeps its log-prob and
    version.
    """

    policy: str
    task_id: str
    environment: str
    group_id: str | None
    """None for held-out sessions: they belong to no group."""
    session_id: str
    branch_id: str
    parent_branch_id: str | None
    shared_prefix: int
    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]
    """NaN where not sampled."""
    policy_versions: npt.NDArray[np.int32]
    """NOT_SAMPLED where not sampled."""
    turns: Sequence[TurnSpan]
    messages: str
    reward: float | None
    """None if unknown; failed sessions are exported with the reward that the run gives them."""
    reward_parts: Mapping[str, float]
    status: str
    interruptions: int
    started_at: float
    """Unix seconds."""
    finished_at: float
    tools: str | None = None
    """JSON of the tools that the branch's requests named; None without any."""
    output: str | None = None
    """What the agent's process wrote, in the first branch of its session; None of an agent without one."""
    images: Sequence[ImageSpan] = ()
    """The images among the tokens, in order."""
