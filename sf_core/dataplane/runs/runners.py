"""The runners of a run, and the answers on their way from those that run agents to those that score them."""

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
    """Of the flow that started it, or under which it was first heard."""
    silent_s: float = 0.0
    """Since it was last heard, as far as the data plane could have heard it."""
    work: Work = "agent"
    num_polls: int = 0
    """Claims it is waiting in."""
    is_retiring: bool = False
    """It is given nothing new, and is released when it is through."""


class Runners(dict[str, Runner]):
    """By name."""

    def __init__(self) -> None:
        super().__init__()
        self._answers: deque[Session] = deque()

    def of(self, work: Work, attempt: int) -> int:
        """How many do this work and go on with it."""
        return sum(r.work == work and r.attempt >= attempt and not r.is_retiring for r in self.values())

    def await_reward(self, session: Session) -> None:
        """Nobody works on this session now; its answer is to be scored."""
        session.runner = ""
        self._answers.append(session)

    def take_answers(self, name: str, limit: int, open_ones: Mapping[str, Session]) -> list[Session]:
        """Open sessions whose answers this runner scores from now on, in the order in which they came."""
        taken: list[Session] = []
        while self._answers and len(taken) < limit:
            session = self._answers.popleft()
            if open_ones.get(session.session_id) is session and not session.runner:
                session.runner = name
                taken.append(session)
        return taken

    def hear(self, name: str) -> None:
        """It lives."""
        if name in self:
            self[name].silent_s = 0.0

    def take_silent(self, elapsed_s: float, bound_s: float) -> list[str]:
        """So much time has passed: forgets those that were silent for longer than the bound; their names."""
        for runner in self.values():
            runner.silent_s = 0.0 if runner.num_polls else runner.silent_s + elapsed_s
        silent = [name for name, runner in self.items() if runner.silent_s > bound_s]
        for name in silent:
            del self[name]
        return silent

    def retire(self, name: str) -> None:
        """Raises ApiError 404."""
        if name not in self:
            raise ApiError(404, f"No runner {name} is connected.", code="runner_not_found")
        self[name].is_retiring = True
