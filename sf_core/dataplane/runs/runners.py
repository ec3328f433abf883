"""The runners of a run, and the answers that agents leave to those who score them: each by itself, or those
of a group together."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sf_core.dataplane.bodies import Work
from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.runs.groups import Group
from sf_core.dataplane.sessions.claims import Claim
from sf_core.dataplane.sessions.session import Session

if TYPE_CHECKING:
    from sf_core.dataplane.runs.run import ServedRun


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


class Judging:
    """Answers of training groups whose sessions are scored together (`environment.group_reward`).

    They wait for each other, and do not age meanwhile. A group is never scored from a part of its answers: if
    only some of its rewards arrive, it is rejected.
    """

    def __init__(self, run: ServedRun) -> None:
        self._run = run
        self._due: deque[int] = deque()
        """Groups of which all sessions have answered, in the order in which they are judged."""

    def includes(self, session: Session) -> bool:
        is_training = session.claim is not None and session.claim.place.split == "train"
        return self._run.spec.judges_groups and is_training and not session.is_external

    def add(self, session: Session) -> None:
        """Have an answer wait for the others of its group, and queue the group if it is the last."""
        _have_wait(session)
        if session.claim is not None:
            self.proceed(session.claim)

    def proceed(self, claim: Claim) -> list[int]:
        """Queue the group of this session, if all of its sessions have answered. Returns the group if it is
        rejected, because some were scored and another one will not be with them."""
        run, group = self._run, self._run.manager.groups.get(claim.place.group)
        if not run.spec.judges_groups or claim.place.split == "holdout" or group is None:
            return []
        answered = self._answered(group)
        waiting = [session for session in answered if session.waits_for_group]
        if group.is_half_judged and len(answered) - len(waiting) < group.num_left:
            run.manager.restore_rejected(group.index, "half_judged")
            return [group.index]
        if waiting and len(waiting) == group.num_left:
            for session in waiting:
                session.waits_for_group, session.began_at = False, run.serving_s
            self._due.append(group.index)
        return []

    def take(self, runner: str, limit: int) -> list[Session]:
        """Sessions whose answers this runner judges from now on: of whole groups, even beyond the limit."""
        taken: list[Session] = []
        while self._due and len(taken) < limit:
            if (group := self._run.manager.groups.get(self._due.popleft())) is not None:
                taken += self._whole(group)
        for session in taken:
            session.runner = runner
        return taken

    def _whole(self, group: Group) -> list[Session]:
        """The answers of a group that no runner has; none if the end of one of them came in between. Then
        the group is rejected, if that one was scored, or the others wait for another answer."""
        unjudged = [
            s for s in self._answered(group) if not s.runner and s.session_id not in self._run.closing
        ]
        if not unjudged or self.reject_halves([group]):
            return []
        if len(unjudged) == group.num_left:
            return unjudged
        for session in unjudged:
            _have_wait(session)
        return []

    def lose(self, session: Session) -> None:
        """Have the answers of a group scored by another runner, or reject it if some were scored already."""
        group = self._run.manager.groups.get(session.claim.place.group) if session.claim else None
        if group is not None and not self.reject_halves([group]):
            self.add(session)

    def reject_halves(self, groups: Iterable[Group]) -> bool:
        """Reject those groups of which some answers were scored and the others have lost their judge."""
        if not self._run.spec.judges_groups:
            return False
        halves = [group for group in groups if group.is_half_judged]
        if halves:
            self._run.reject_all(halves, "half_judged")
            self._run.count("rejected_groups.half_judged", len(halves))
        return bool(halves)

    def _answered(self, group: Group) -> list[Session]:
        """Sessions of a group that have answered and are not scored yet, in order of their places. The end of
        some may be being recorded."""
        run = self._run
        found = [
            session
            for session in (run.closing | run.sessions).values()
            if session.claim is not None
            and session.claim.place[:2] == (group.split, group.index)
            and session.answer is not None
            and run.counts(session)
        ]
        return sorted(found, key=lambda session: session.claim or ())


def _have_wait(session: Session) -> None:
    """Have an answer, which no runner has any more, wait for others of its group."""
    session.runner, session.began_at, session.waits_for_group = "", math.inf, True
