"""How many tokens a run samples, in all and of late."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field


@dataclass
class TokenMeter:
    """Tokens per second over a sliding window."""

    window_s: float = 10.0
    total: int = 0
    _recent: deque[tuple[float, int]] = field(default_factory=deque)

    def add(self, num_tokens: int) -> None:
        self.total += num_tokens
        self._recent.append((time.monotonic(), num_tokens))
        self._forget()

    def per_second(self) -> float:
        self._forget()
        return sum(n for _, n in self._recent) / self.window_s

    def _forget(self) -> None:
        while self._recent and self._recent[0][0] < time.monotonic() - self.window_s:
            self._recent.popleft()
