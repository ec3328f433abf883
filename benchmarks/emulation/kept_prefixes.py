"""A model of a device's prefix cache: KV that turns leave for the next turns of their sessions. Pure.

The emulated engine and the simulator share it. They choose the keys; tokens are only counted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable


class KeptPrefixes:
    """Holds KV of `room` tokens, that of running requests included; evicts the oldest entry first."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._kept: OrderedDict[Hashable, int] = OrderedDict()
        self._num_tokens = 0

    def keep(self, key: Hashable, num_tokens: int, num_running: int) -> None:
        """Keep the KV of a turn that ended, while running requests hold `num_running` tokens."""
        self.take(key)
        self._kept[key] = num_tokens
        self._num_tokens += num_tokens
        while self._kept and self._num_tokens + num_running > self._room:
            self._num_tokens -= self._kept.popitem(last=False)[1]

    def take(self, key: Hashable) -> int:
        """Remove an entry that a turn reuses; returns how many tokens it holds, 0 if nothing is kept."""
        num_tokens = self._kept.pop(key, 0)
        self._num_tokens -= num_tokens
        return num_tokens

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def clear(self) -> None:
        """Forget all entries, because other weights are loaded."""
        self._kept.clear()
        self._num_tokens = 0
