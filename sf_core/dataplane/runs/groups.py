"""Groups: the sessions of one task whose rewards are compared, and the progress of each. Pure state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from sf_core.config.rollout_config import REASONS, Reason
from sf_core.dataplane.sessions.claims import Claim, SessionSlot, Split
from sf_core.recipes.outcomes import Outcome, Pick, Result


class Progress(Enum):
    OPEN = auto()
    RUNNING = auto()
    DONE = auto()
    CUT = auto()
    """The group goes on without it: it failed for good, or the group was complete before it ended."""


@dataclass(slots=True)
class Member:
    progress: Progress = Progress.OPEN
    attempt: int = -1
    """The latest attempt given out; only its report counts."""
    num_failures: int = 0
    result: Result | None = None
    """None until it is done, and of a held-out task that has no result."""
    min_version: int | None = None
    """Oldest policy version of a token of the latest attempt; while it runs, a lower bound."""

    def is_running(self, attempt: int) -> bool:
        return self.progress is Progress.RUNNING and self.attempt == attempt


@dataclass(slots=True)
class Group:
    split: Split
    index: int
    size: int
    is_external: bool = False
    """Whether external agents work on it. Its sessions are not retried: nobody would take them."""
    first_attempt: int = 0
    """Number of the first attempt at each of its sessions."""
    pick: Pick | None = None
    """Its task; None if it is external."""
    version: int = 0
    """Policy version when it was begun."""
    need: int = field(init=False)
    """Sessions with which it is complete."""
    lost: Reason | None = field(default=None, init=False)
    """Why it cannot be complete any more; None while it can."""
    members: list[Member] = field(init=False)
    num_done: int = field(default=0, init=False)
    """Members that are done; cached, like `min_version`, because a batch may look at 100,000 groups."""
    min_version: int | None = field(default=None, init=False)
    """Oldest policy version of any token; None before the first token."""

    def __post_init__(self) -> None:
        self.members = [Member(attempt=self.first_attempt - 1) for _ in range(self.size)]
        self.need = self.size if self.pick is None else self.pick.need

    def claims(self, is_external: bool = False) -> Iterator[Claim]:
        """The open members in order, as sessions to give out to runners or to external agents."""
        for i, member in enumerate(self.members):
            if member.progress is Progress.OPEN:
                slot = SessionSlot(self.split, self.index, i)
                yield Claim(slot, member.attempt + 1, member.num_failures, is_external)

    def note_started(self, claim: Claim, version: int) -> None:
        """Note that a token of the session may have been sampled by this version or a later one."""
        member = self.members[claim.slot.member]
        if member.min_version is None:
            member.min_version = version
            self._count()

    def reopen(self, claim: Claim) -> None:
        """Open the place of a running session again, without counting a failure."""
        member = self.members[claim.slot.member]
        if member.is_running(claim.attempt):
            member.progress = Progress.OPEN
            member.min_version = None
            self._count()

    def open(self, claim: Claim) -> None:
        """Give out a session, unless a later attempt at it was given out."""
        member = self.members[claim.slot.member]
        if claim.attempt > member.attempt:
            self.note_given_out(claim)
            member.progress = Progress.RUNNING
            member.min_version = None
            self._count()

    def note_given_out(self, claim: Claim) -> None:
        """Note a claim: neither its number nor its draws are reused."""
        member = self.members[claim.slot.member]
        member.attempt = max(member.attempt, claim.attempt)
        member.num_failures = max(member.num_failures, claim.draw)

    def note_attempts(self, earlier: Group) -> None:
        """Go on counting from the attempts of the group in whose place this one is."""
        for member, before in zip(self.members, earlier.members, strict=False):
            member.attempt = before.attempt
            member.num_failures = before.num_failures

    def finish(self, claim: Claim, result: Result | None, min_version: int | None) -> None:
        member = self.members[claim.slot.member]
        member.progress = Progress.DONE
        member.attempt = claim.attempt
        member.result = result
        member.min_version = min_version
        self._count()

    def fail(self, claim: Claim) -> int:
        """Open the place again; returns how often its sessions have failed by now."""
        self.reopen(claim)
        member = self.members[claim.slot.member]
        member.num_failures += 1
        return member.num_failures

    def leave_out(self, claim: Claim, least: int, reason: Reason) -> None:
        """Go on without a member that failed for good, with fewer sessions than planned if need be. If that
        leaves fewer than `least`, the group is lost."""
        left = sum(member.progress is not Progress.CUT for member in self.members) - 1
        if left < least:
            self.lost = reason
            return
        self.need = min(self.need, left)
        member = self.members[claim.slot.member]
        member.progress = Progress.CUT
        member.min_version = None
        self._count()

    @property
    def is_complete(self) -> bool:
        return self.num_done >= self.need

    @property
    def num_left(self) -> int:
        """Sessions that have to end before it is complete."""
        return self.need - self.num_done

    @property
    def num_open(self) -> int:
        return sum(member.progress is Progress.OPEN for member in self.members)

    @property
    def results(self) -> tuple[Result, ...]:
        """Results of the members that count, in order of their places."""
        return tuple(member.result for member in self.members if member.result is not None)

    @property
    def is_half_judged(self) -> bool:
        """Whether one of its sessions was scored, while another one still is to be."""
        is_scored = any(result.status not in REASONS for result in self.results)
        return is_scored and not self.is_complete

    def outcome(self, verdict: str) -> Outcome:
        return Outcome(self.index, self.pick, self.size, self.version, self.results, verdict)

    def _count(self) -> None:
        self.num_done = sum([member.progress is Progress.DONE for member in self.members])
        if self.is_complete:
            for member in self.members:
                if member.progress is not Progress.DONE:
                    member.progress = Progress.CUT
                    member.min_version = None
        versions = [member.min_version for member in self.members if member.min_version is not None]
        self.min_version = min(versions, default=None)
