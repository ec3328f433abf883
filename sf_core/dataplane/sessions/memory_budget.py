"""The memory of open sessions and of results that are not stored yet, against its bound.

Owns the account alone. While memory is full, new groups (runs/decide.py) and new external sessions
(control/plane.py) wait; begun sessions go on.
"""

from __future__ import annotations

import sys
from typing import Protocol

from sf_core.dataplane.conditions import Condition
from sf_core.dataplane.options import DataplaneOptions
from storage.tables.judgements import Judgement

JUDGEMENT_BYTES = 200
"""Measured memory of the object, without texts."""


class Sized(Protocol):
    @property
    def num_bytes(self) -> int:
        """Approximate memory of the item, in bytes."""


class MemoryBudget:
    def __init__(self, bound_mb: float = DataplaneOptions.memory_mb) -> None:
        self.bound_bytes = int(bound_mb * 2**20)
        self.num_bytes = 0
        """Sum of the bytes of all items, each as of its last weighing."""
        self.watchers: set[Condition] = set()
        """Notified when memory is no longer full."""
        self._weights: dict[Sized, int] = {}

    def add(self, item: Sized) -> None:
        """Count an item until it is removed."""
        self._weights.setdefault(item, 0)
        self.update(item)

    def update(self, item: Sized) -> None:
        """Update the bytes of an item; no effect if the item was not added."""
        if item in self._weights:
            before = self._weights[item]
            self._weights[item] = item.num_bytes
            self._grow(self._weights[item] - before)

    def remove(self, item: Sized) -> None:
        self._grow(-self._weights.pop(item, 0))

    @property
    def is_full(self) -> bool:
        return self.num_bytes > self.bound_bytes

    def __str__(self) -> str:
        used_mb = self.num_bytes / 2**20
        bound_mb = self.bound_bytes / 2**20
        return f"memory: {used_mb:,.1f} of {bound_mb:,.1f} MB held"

    def _grow(self, num_bytes: int) -> None:
        was_full = self.is_full
        self.num_bytes += num_bytes
        if was_full and not self.is_full:
            for condition in self.watchers:
                condition.notify()


def size_of_judgement(judgement: Judgement) -> int:
    """Approximate memory of a judgement in bytes."""
    texts = judgement.messages, judgement.reply, judgement.verdict
    return JUDGEMENT_BYTES + sum(map(sys.getsizeof, texts))
