"""The runners of a run, and the answers that wait for one of them: each by itself, or those of a group
together.

Answers of a group wait for each other, and do not age meanwhile: a group is never scored from a part of them.
"""

from __future__ import annotations

import math
import secrets
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sf_core.dataplane.api_schemas import Spent, Work
from sf_core.dataplane.routing.connection import EngineConnection
from sf_core.dataplane.runs.groups import Group
from sf_core.dataplane.sessions.session import Session


@dataclass
class Runner:
    attempt: int
    """Attempt of the flow that started it, or the current one at its first claim."""
    silent_s: float = 0.0
    """Seconds since it was last heard, counting only time in which the data plane could hear it."""
    work: Work = "agent"
    num_polls: int = 0
    """Number of its claims that are waiting."""
    spent: Spent | None = None
    """Since it began, by its last claim. None: before its first claim to this process, from which on it
    counts, because the runner may be older than the process."""


class Runners(dict[str, Runner]):
    """The runners of a run, by name."""

    def count(self, work: Work, attempt: int) -> int:
        """Number of runners of this work and this attempt or a later one."""
        return sum(runner.work == work and runner.attempt >= attempt for runner in self.values())

    def hear(self, name: str) -> None:
        """Note a sign of life; no effect for an unknown runner."""
        if name in self:
            self[name].silent_s = 0.0

    def take_silent(self, elapsed_s: float, bound_s: float) -> list[str]:
        """Age runners by `elapsed_s`; forget those silent for longer than the bound, return their names."""
        for runner in self.values():
            runner.silent_s = 0.0 if runner.num_polls else runner.silent_s + elapsed_s
        silent = [name for name, runner in self.items() if runner.silent_s > bound_s]
        for name in silent:
            del self[name]
        return silent


class Scoring:
    def __init__(self) -> None:
        self._answers: deque[Session] = deque()
        self.groups: deque[int] = deque()
        """Groups of which all sessions have answered, in the order in which they are scored."""

    def queue(self, session: Session) -> None:
        """Queue the answer of a session; no runner works on the session until it is scored."""
        session.runner = session.scoring = ""
        self._answers.append(session)

    def pop_answers(self, runner: str, limit: int, open_ones: Mapping[str, Session]) -> list[Session]:
        """Open sessions whose answers this runner scores from now on, in the order of the queue."""
        popped: list[Session] = []
        while self._answers and len(popped) < limit:
            session = self._answers.popleft()
            if open_ones.get(session.session_id) is session and not session.runner:
                give_to(runner, session)
                popped.append(session)
        return popped

    def hold_back(self, session: Session) -> None:
        """Have an answer, which no runner has, wait for others of its group."""
        session.runner = session.scoring = ""
        session.began_at = math.inf
        session.waits_for_group = True

    def queue_group(self, group: Group, answered: Sequence[Session], now: float) -> None:
        """Queue a group if the last of its sessions has answered; `now` is on the clock of sessions."""
        waiting = [session for session in answered if session.waits_for_group]
        if waiting and len(waiting) == group.num_left:
            for session in waiting:
                session.waits_for_group = False
                session.began_at = now
            self.groups.append(group.index)


class Effort:
    """What runners have spent on sessions since the last batch, and whether engines waited meanwhile. It is
    not recorded: a data plane that starts again begins to count again."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._since = time.monotonic()
        self._runners: defaultdict[str, Spent] = defaultdict(Spent)
        self._free_s = self._served_s = 0.0

    def record(self, runner: str, spent: Spent) -> None:
        self._runners[runner] += spent

    def record_engines(self, engines: Iterable[EngineConnection]) -> None:
        """Take over the times that engines have counted since the last look; those of a lost engine are
        lost."""
        for engine in engines:
            engine.count_time()
            self._served_s += engine.served_s
            self._free_s += engine.idle_s
            engine.served_s = engine.idle_s = 0.0

    def totals(self, engines: Iterable[EngineConnection]) -> dict[str, Any]:
        """The facts for the manifest of a batch; begins to count for the next one."""
        self.record_engines(engines)
        facts = {
            "runners": {name: spent.model_dump() for name, spent in self._runners.items()},
            "runners_seconds": round(time.monotonic() - self._since, 3),
            "engines_free": round(self._free_s / self._served_s, 4) if self._served_s else None,
        }
        self._begin()
        return facts


def give_to(runner: str, session: Session) -> None:
    """Have a runner score the answer of a session, under a name that no other claim of it has."""
    session.runner = runner
    session.scoring = secrets.token_hex(8)
