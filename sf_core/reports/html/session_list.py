"""The list of a run's sessions, one line each, and the choice of the most informative. Reads no token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest

import numpy as np
import pyarrow.compute as pc

from sf_core.reports.sessions import SessionSet, merge_branches

_COLUMNS = ("session_id", "task_id", "environment", "group_id", "reward", "status")
_VERSIONS = ("min_version", "max_version", "interruptions")


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """One line of the page's list of sessions."""

    session_id: str
    kind: str
    """Kind of the set that the session is in; `number` and `marks` are the set's too."""
    number: int
    marks: tuple[str, str]
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


def list_sessions(session_set: SessionSet) -> list[SessionFacts]:
    """One line per session. Raises ValueError with one sentence if a file is missing or broken."""
    columns = [*_COLUMNS, *_VERSIONS]
    branches = session_set.read([*columns, "loss_mask"])
    mask = branches["loss_mask"].combine_chunks()
    tokens = mask.value_lengths().to_numpy()
    # the mask is true for tokens that count
    sampled = np.bincount(pc.list_parent_indices(mask), pc.list_flatten(mask), len(branches)).astype(int)
    merged = merge_branches(branches, columns, {"tokens": tokens, "sampled": sampled})
    kind = session_set.kind
    number = session_set.number
    marks = session_set.marks
    rows = merged.to_pylist()
    return [SessionFacts(kind=kind, number=number, marks=marks, **row) for row in rows]


def choose_extreme(sessions: Sequence[SessionFacts]) -> Iterator[SessionFacts]:
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
