"""The status of a run."""

from __future__ import annotations

from typing import Any

STATUS: dict[str, Any] = {
    "stage": "train",
    "iteration": 2,
    "next_batch": 3,
    "groups_accepted": 5,
    "groups_needed": 8,
    "groups_in_flight": 11,
    "reward_recent": 0.5,
    "tokens_per_second": 1234.0,
    "sessions_running": 88,
    "straggler": {"session": "run-1.g3.0.a0", "group": 3, "age_s": 5.0},
    "counters": {"failed_sessions": 0},
    "engines": [{"worker": "r0", "version": 2}, {"worker": "t0", "version": None}],
}
