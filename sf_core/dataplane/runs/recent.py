"""Rewards, lengths and failures of a run's latest sessions, and its token rate, as status reports them."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sf_core.dataplane.sessions.finished import FinishedSession

NUM_RECENT = 256


class RecentResults:
    def __init__(self) -> None:
        self._rewards: deque[float] = deque(maxlen=NUM_RECENT)
        self._tokens: deque[int] = deque(maxlen=NUM_RECENT)
        self.last_error = ""
        self.failures_in_a_row = 0
        """Sessions that failed and are retried or excluded, since the last one that counted."""
        self.discarded: Counter[str] = Counter()
        """Training sessions that failed and were retried or excluded since the last batch, by reason."""

    def note_finished(self, result: FinishedSession) -> None:
        """Count a session with its reward, also one whose failure counts as the policy's."""
        self.failures_in_a_row = 0
        self.last_error = result.error or self.last_error
        self._rewards.append(result.reward)
        self._tokens.append(sum(int(row.loss_mask.sum()) for row in result.trajectories))

    def note_failed(self, error: str) -> None:
        self.failures_in_a_row += 1
        self.last_error = error

    def forget_discarded(self, sealed: Mapping[str, Any]) -> None:
        """Leave out the discarded sessions that the answer about a sealed batch tells of."""
        self.discarded -= Counter(sealed.get("discarded", {}))

    def forget_failures(self) -> None:
        """Reset the failures, whose cause may have been mended."""
        self.discarded.clear()
        self.failures_in_a_row, self.last_error = 0, ""

    @property
    def mean_reward(self) -> float | None:
        """Mean reward of the last NUM_RECENT sessions; None before one has finished."""
        return sum(self._rewards) / len(self._rewards) if self._rewards else None

    @property
    def mean_tokens(self) -> float | None:
        """Mean tokens sampled per session, of the last NUM_RECENT; None before one has finished."""
        return sum(self._tokens) / len(self._tokens) if self._tokens else None


@dataclass
class TokenRate:
    """Tokens in total, and per second over a sliding window."""

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
