"""The runners of a run, and the answers that agent runners leave to reward runners."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from sf_core.dataplane.bodies import Work
from sf_core.dataplane.errors import ApiError
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
    is_retiring: bool = False
    """It gets nothing new, and is released once it has finished its sessions."""


class Runners(dict[str, Runner]):
    """The runners of a run, by name."""

    def __init__(self) -> None:
        super().__init__()
        self._answers: deque[Session] = deque()

    def of(self, work: Work, attempt: int) -> int:
        """Number of runners of this work and this attempt or a later one that are not retiring."""
        return sum(r.work == work and r.attempt >= attempt and not r.is_retiring for r in self.values())

    def await_reward(self, session: Session) -> None:
        """Queue the answer of a session for scoring; no runner works on the session until then."""
        session.runner = ""
        self._answers.append(session)

    def take_answers(self, name: str, limit: int, open_ones: Mapping[str, Session]) -> list[Session]:
        """Open sessions whose answers this runner scores from now on, in the order of the queue."""
        taken: list[Session] = []
        while self._answers and len(taken) < limit:
            session = self._answers.popleft()
            if open_ones.get(session.session_id) is session and not session.runner:
                session.runner = name
                taken.append(session)
        return taken

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

    def retire(self, name: str) -> None:
        """Give this runner nothing new. Raises ApiError 404."""
        if name not in self:
            raise ApiError(404, f"No runner {name} is connected.", code="runner_not_found")
        self[name].is_retiring = True
