"""Capability tags: free words for what a worker can do. Only this module says which ones a run's tasks need.

A user's own tags (`h20`, `spot`) say which workers to prefer where there is a choice (`cluster.prefer`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

COMPUTING = frozenset({"rollout", "train"})
"""Tags of workers that compute on their device."""


@dataclass(frozen=True, slots=True)
class TaskKind:
    needs: tuple[str, ...]
    """Tags a worker must carry, all of them."""
    priority: int = 0
    """Place in a worker's queue; higher goes first."""
    is_optional: bool = False
    """A run can do without such a worker: others do its work."""


TASK_KINDS: dict[str, TaskKind] = {
    "lease": TaskKind(("rollout",)),
    "agents": TaskKind(("agent",)),
    # without such workers the agent runners score
    "rewards": TaskKind(("reward",), is_optional=True),
    "warmstart": TaskKind(("train",)),
    # ahead of the next lease, which waits in the same queue
    "train": TaskKind(("train",), priority=1),
    **dict.fromkeys(
        ("demonstrate", "rollout", "filter", "publish", "evaluate", "finish"), TaskKind(("cpu",))
    ),
}
"""Task kinds by the name of the Prefect task."""


def needed_tags(without: Collection[str] = ()) -> list[str]:
    """Every tag that some task of a run needs, without those of the task kinds that it does without."""
    kinds = [kind for name, kind in TASK_KINDS.items() if not kind.is_optional and name not in without]
    return sorted({tag for kind in kinds for tag in kind.needs})
