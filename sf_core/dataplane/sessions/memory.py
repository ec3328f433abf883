"""The memory that open sessions and results which are not stored yet take, against its bound.

Owns the account alone. What is held back while memory is full: new groups (runs/decide.py) and new
external sessions (control/plane.py); what has begun goes on.
"""

from __future__ import annotations

import sys
from typing import Protocol

from sf_core.dataplane.options import DataplaneOptions
from sf_core.dataplane.signals import Signal
from storage.tables.judgements import Judgement

JUDGEMENT_BYTES = 200
"""Measured memory of the object, without texts."""


class Sized(Protocol):
    @property
    def num_bytes(self) -> int:
        """Approximate memory of the item, in bytes."""


class Memory:
    def __init__(self, bound_mb: float = DataplaneOptions.memory_mb) -> None:
        self.bound_bytes = int(bound_mb * 2**20)
        self.num_bytes = 0
        """Sum of the bytes of all items, each as it was last weighed."""
        self.watchers: set[Signal] = set()
        """Notified when memory is no longer full."""
        self._weights: dict[Sized, int] = {}

    def add(self, item: Sized) -> None:
        """Count an item until it is removed."""
        self._weights.setdefault(item, 0)
        self.weigh(item)

    def weigh(self, item: Sized) -> None:
        """Count an item as it is now; no effect if it is not counted."""
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
        held = self.num_bytes / 2**20
        bound = self.bound_bytes / 2**20
        return f"memory: {held:,.1f} of {bound:,.1f} MB held"

    def _grow(self, num_bytes: int) -> None:
        was_full = self.is_full
        self.num_bytes += num_bytes
        if was_full and not self.is_full:
            for signal in self.watchers:
                signal.notify()


def size_of_judgement(judgement: Judgement) -> int:
    """Approximate memory of a judgement in bytes."""
    texts = judgement.messages, judgement.reply, judgement.verdict
    return JUDGEMENT_BYTES + sum(map(sys.getsizeof, texts))
