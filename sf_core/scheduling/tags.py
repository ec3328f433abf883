"""Capability tags: free words for what a worker can do. Which ones the tasks of a run need stands here only.

A user's own tags (`h20`, `spot`) say which workers to prefer where there is a choice (`cluster.prefer`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TaskKind:
    needs: tuple[str, ...]
    """Tags a worker must carry, all of them."""
    priority: int = 0
    """Place in a worker's queue; higher goes first."""
    is_optional: bool = False
    """A run can do without: others do its work."""


TASK_KINDS: dict[str, TaskKind] = {
    "lease": TaskKind(("rollout",)),
    "agents": TaskKind(("agent",)),
    # where nobody carries it, runners of agents score
    "rewards": TaskKind(("reward",), is_optional=True),
    "warmstart": TaskKind(("train",)),
    # ahead of the next lease, which waits in the same queue
    "train": TaskKind(("train",), priority=1),
    **dict.fromkeys(("rollout", "filter", "publish", "evaluate", "finish"), TaskKind(("cpu",))),
}
"""By the name of the Prefect task."""


def needed_tags() -> list[str]:
    """Every tag that some task of a run needs."""
    return sorted({tag for kind in TASK_KINDS.values() if not kind.is_optional for tag in kind.needs})


def is_word(value: str) -> str:
    """Returns a tag or a worker's name as it is. Raises ValueError if Dask's `--resources` could not hold it.

    >>> is_word("h20")
    'h20'
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value):
        raise ValueError(f"{value!r} is no tag or name: use letters, digits, '.', '_' and '-'")
    return value
