"""The list of a run's sessions, one line each, and the choice of the most informative. Reads no token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest

import numpy as np
import pyarrow.compute as pc

from sf_core.reports.sessions import SessionSet
from storage.tables.schema import SCHEMA

_OF_BRANCHES = {
    # all branches of a session are alike in these
    **dict.fromkeys(("task_id", "environment", "group_id", "reward", "status"), "first"),
    **dict.fromkeys(("tokens", "sampled", "interruptions"), "sum"),
    "place": "min",
    "min_version": "min",
    "max_version": "max",
}
"""How facts of a session come from those of its branches."""


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


def list_sessions(sampling: SessionSet) -> list[SessionFacts]:
    """One line per session. Raises ValueError with one sentence if a file is missing or broken."""
    table = sampling.read(["session_id", "loss_mask", *(_OF_BRANCHES.keys() & {*SCHEMA.names})])
    mask = table["loss_mask"].combine_chunks()
    sampled = np.bincount(pc.list_parent_indices(mask), pc.list_flatten(mask), len(table)).astype(int)
    more = {"tokens": pc.list_value_length(mask), "sampled": [sampled], "place": [np.arange(len(table))]}
    for name, column in more.items():
        table = table.append_column(name, column)
    groups = table.group_by("session_id", use_threads=False)
    # they come in any order
    found = groups.aggregate([*_OF_BRANCHES.items(), ([], "count_all")]).sort_by("place_min")
    return [
        SessionFacts(
            row["session_id"],
            sampling.kind,
            sampling.number,
            sampling.marks,
            branches=row["count_all"],
            **{name: row[f"{name}_{how}"] for name, how in _OF_BRANCHES.items() if name != "place"},
        )
        for row in found.to_pylist()
    ]


def choose_telling(sessions: Sequence[SessionFacts]) -> Iterator[SessionFacts]:
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
