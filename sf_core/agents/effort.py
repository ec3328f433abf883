"""What a runner spends on its sessions beside the policy's answers, for the data plane."""

from __future__ import annotations

import os
import threading

from sf_core.agents.loop_watch import read_schedule

Spent = dict[str, float]
"""cpu_s: CPU seconds of this process, and of programs that it has started and that have ended. busy_s:
seconds in which the event loop computed or waited for a core. num_ended: sessions, or scored answers, that
have ended."""


class Effort:
    def __init__(self) -> None:
        """Counts what this process spends from now on. Its event loop runs in the calling thread."""
        self._thread = threading.get_native_id()
        self.num_ended = 0
        self._before = self._sum()

    def spent(self) -> Spent:
        """What was spent since this was made."""
        return {name: max(0, now - self._before[name]) for name, now in self._sum().items()}

    def _sum(self) -> Spent:
        times = os.times()
        loop = read_schedule(self._thread)
        cpu_s = times.user + times.system + times.children_user + times.children_system
        busy_s = loop.computed_s + loop.queued_s
        return {"cpu_s": cpu_s, "busy_s": busy_s, "num_ended": self.num_ended}
