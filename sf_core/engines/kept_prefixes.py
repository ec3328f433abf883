"""What ended turns leave in a device's memory, for the next turns of their sessions. Pure.

The emulated engine and the simulator ask the same code: keys are theirs, tokens are only counted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable


class KeptPrefixes:
    """Keys and values of so many tokens find room, those of running requests among them; what was left first
    is forgotten first."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._kept: OrderedDict[Hashable, int] = OrderedDict()
        self._num_tokens = 0

    def keep(self, key: Hashable, num_tokens: int, num_running: int) -> None:
        """A turn has ended, those that run hold `num_running` tokens."""
        self.take(key)
        self._kept[key] = num_tokens
        self._num_tokens += num_tokens
        while self._kept and self._num_tokens + num_running > self._room:
            self._num_tokens -= self._kept.popitem(last=False)[1]

    def take(self, key: Hashable) -> int:
        """A turn goes on from there: how many tokens it need not compute; 0 if nothing is kept."""
        num_tokens = self._kept.pop(key, 0)
        self._num_tokens -= num_tokens
        return num_tokens

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def clear(self) -> None:
        """Other weights are loaded."""
        self._kept.clear()
        self._num_tokens = 0
