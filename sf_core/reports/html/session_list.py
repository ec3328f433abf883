"""The list of a run's sessions, one line each, and the choice of the most informative. Reads no token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import Any

import numpy as np
import pyarrow.compute as pc

from sf_core.reports.view import Sampling

COLUMNS = [
    "session_id",
    "task_id",
    "environment",
    "group_id",
    "reward",
    "status",
    "min_version",
    "max_version",
    "interruptions",
    "loss_mask",
]


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """One line of the page's list of sessions."""

    session_id: str
    kind: str
    """Kind of the session's Sampling; `number` and `fate` are the Sampling's too."""
    number: int
    fate: str
    task_id: str
    environment: str
    group_id: str | None
    reward: float | None
    status: str
    branches: int
    tokens: int
    """Number of tokens in all branches."""
    sampled: int
    min_version: int | None
    max_version: int | None
    interruptions: int


def list_sessions(sampling: Sampling) -> list[SessionFacts]:
    """One line per session. Raises ValueError with one sentence if a file is missing or broken."""
    table = sampling.read(COLUMNS)
    if not len(table):
        return []
    mask = table["loss_mask"].combine_chunks()
    rows = pc.list_parent_indices(mask).to_numpy()
    sampled = np.bincount(rows, pc.list_flatten(mask).to_numpy(zero_copy_only=False), len(table))
    branches: dict[str, list[dict[str, Any]]] = {}
    for row, tokens, count in zip(
        table.drop_columns("loss_mask").to_pylist(),
        pc.list_value_length(mask).to_pylist(),
        sampled.tolist(),
        strict=True,
    ):
        branches.setdefault(row["session_id"], []).append(row | {"tokens": tokens, "sampled": int(count)})
    return [_session(sampling, rows) for rows in branches.values()]


def telling(sessions: Sequence[SessionFacts]) -> Iterator[SessionFacts]:
    """The two most extreme sessions by each criterion: interruptions, branches, versions, tokens, reward."""
    reasons: tuple[Callable[[SessionFacts], float], ...] = (
        lambda session: session.interruptions,
        lambda session: session.branches,
        lambda session: (session.max_version or 0) - (session.min_version or 0),
        lambda session: session.tokens,
        lambda session: -np.inf if session.reward is None else session.reward,
        lambda session: -np.inf if session.reward is None else -session.reward,
    )
    for reason in reasons:
        yield from nlargest(2, sessions, key=reason)


def _session(sampling: Sampling, branches: Sequence[dict[str, Any]]) -> SessionFacts:
    first = branches[0]
    same = ("session_id", "task_id", "environment", "group_id", "reward", "status")
    return SessionFacts(
        **{name: first[name] for name in same},
        kind=sampling.kind,
        number=sampling.number,
        fate=sampling.fate,
        branches=len(branches),
        **{name: sum(row[name] for row in branches) for name in ("tokens", "sampled", "interruptions")},
        min_version=min((v for row in branches if (v := row["min_version"]) is not None), default=None),
        max_version=max((v for row in branches if (v := row["max_version"]) is not None), default=None),
    )
