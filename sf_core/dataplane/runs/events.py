"""Events of runs, as journals hold them. What they do is in state.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from sf_core.config.rollout_config import Reason
from sf_core.dataplane.api_schemas import RunSpec
from sf_core.dataplane.journal.journal_file import Event, make_decoder
from sf_core.dataplane.runs.ledger import Batch
from sf_core.dataplane.sessions.claims import Claim, is_external
from sf_core.dataplane.sessions.finished import FinishedSession, JudgedSession
from sf_core.dataplane.sessions.session import Session
from sf_core.dataplane.sessions.turn_events import TurnEvent
from sf_core.recipes.outcomes import Pick
from sf_core.types import WeightsRef
from storage.tables.judgements import Judgement


class Registered(Event, tag="registered"):
    """A flow registered the run; the first event of every journal."""

    spec: RunSpec


class Published(Event, tag="published"):
    weights: WeightsRef


class EvaluationStarted(Event, tag="evaluationstarted"):
    version: int
    num_tasks: int


class OpenedSession(msgspec.Struct, array_like=True):
    """What is known of a session when it is opened; fields are those of Session."""

    session_id: str
    claim: Claim | None = None
    runner: str = ""
    started_at: float = msgspec.field(default_factory=time.time)
    group: str | None = None
    task_id: str = ""
    environment: str = ""
    metadata: dict[str, Any] = {}
    by_operator: bool = False


class Opened(Event, tag="opened"):
    """Sessions were given to a runner, or opened for external agents."""

    facts: list[OpenedSession]

    def sessions(self) -> list[Session]:
        return [Session(**msgspec.structs.asdict(opened)) for opened in self.facts]


class Rewarded(Event, tag="rewarded"):
    """A reward was reported for a session that stays open."""

    session_id: str
    reward: float
    parts: dict[str, float]
    steps: dict[str, float] = msgspec.field(default_factory=dict)


class Named(Event, tag="named"):
    """The agent of a session has begun, on this task."""

    session_id: str
    task_id: str
    environment: str


class Answered(Event, tag="answered"):
    """The agent of a session is done, and its answer is to be scored."""

    session_id: str
    answer: str
    output: str | None = None


class Unjudged(Event, tag="unjudged"):
    """An answer, or all answers of its group, could not be judged and is to be scored again."""

    session_id: str
    error: str
    judgements: list[Judgement]


class Closed(Event, tag="closed"):
    """An external session ended without a result."""

    session_id: str
    report: str = ""
    """Digest of the report that ended it, as in Failed; empty if none did."""


class Finished(Event, tag="finished"):
    result: FinishedSession


class Judged(Finished, tag="judged"):
    """A session finished for whose reward judges were asked."""

    result: JudgedSession


class Failed(Event, tag="failed"):
    claim: Claim
    reason: Reason
    error: str = ""
    report: str = ""


class Lost(Event, tag="lost"):
    """The session's runner is gone; its place is open again."""

    claim: Claim


class Admitted(Event, tag="admitted"):
    """A group of the run's own was begun, with this task; comes before its first session."""

    group: int
    pick: Pick
    version: int


class Rejected(Event, tag="rejected"):
    group: int
    reason: str


class Sealed(Event, tag="sealed"):
    index: int
    batch: Batch
    answer: dict[str, Any]


class Stored(Event, tag="stored"):
    """The rows of finished external sessions are in the run directory."""

    session_ids: list[str]


class Revoked(Event, tag="revoked"):
    lease_id: str


class Paused(Event, tag="paused"):
    engine_id: str | None
    """None: the run."""


class Resumed(Event, tag="resumed"):
    engine_id: str | None


class Released(Event, tag="released"):
    pass


RunEvent = (
    Registered | Published | EvaluationStarted | Admitted | Opened | Rewarded | Named | Answered | Unjudged
    | Closed | Finished | Judged | Failed | Lost | Rejected | Sealed | Stored | Revoked | Paused | Resumed
    | Released | TurnEvent
)  # fmt: skip


def finished(result: FinishedSession) -> Finished:
    """The event of a session's end."""
    return Judged(result) if isinstance(result, JudgedSession) else Finished(result)


read_event: Callable[[bytes], RunEvent] = make_decoder(RunEvent)


@dataclass(frozen=True, slots=True)
class Needed:
    """What a restart of a run needs of its journal."""

    spec: RunSpec
    is_released: bool
    sessions: set[str]
    """Open sessions."""
    unstored: set[str]
    """External sessions whose rows are not stored."""
    groups: set[int]
    """Groups of the last batch, groups that left since then, and groups that are there."""
    newest_evaluation: int
    last_batch: int

    def keeper(self) -> Callable[[RunEvent], bool]:
        """Says of the events of a journal, in their order, which to keep. It is called in another thread,
        while the run goes on."""
        reopened: set[str] = set()
        """Sessions of external agents that a restart opens: what ended them must be kept."""
        is_ours = True
        """Whether the event is of the run that is served, and not of one that it replaced."""

        def counts(claim: Claim | None) -> bool:
            if claim is None:
                return False
            split, group, _ = claim.slot
            return group in self.groups if split == "train" else group >= self.newest_evaluation

        def is_needed(event: RunEvent) -> bool:
            nonlocal is_ours
            match event:
                case Registered(spec):
                    is_ours = spec.origin == self.spec.origin
                    return False  # the head has what it led to
                case Finished(result) if not is_ours:
                    return result.session_id in self.unstored
                case Stored(session_ids) if not is_ours:
                    return not self.unstored.isdisjoint(session_ids)
                case _ if not is_ours:
                    return False
                case Published() | Admitted() | Revoked() | Paused() | Resumed():
                    return False  # the head has what they led to
                case EvaluationStarted(version):
                    return version >= self.newest_evaluation
                case Opened(opened):
                    is_kept = any(
                        session.session_id in self.sessions or counts(session.claim) for session in opened
                    )
                    external = [session for session in opened if is_external(session.claim)]
                    reopened.update(session.session_id for session in external if is_kept)
                    return is_kept
                case Closed(session_id):
                    return session_id in reopened
                case Finished(result) if is_external(result.claim):
                    return result.session_id in reopened or result.session_id in self.unstored
                case Finished(result):
                    return counts(result.claim)
                case Failed(claim) | Lost(claim):
                    return counts(claim) or claim.session_id(self.spec.run_id) in reopened
                case Rejected(group):
                    return group in self.groups
                case Sealed(index):
                    return index == self.last_batch
                case Stored(session_ids):
                    return not reopened.union(self.unstored).isdisjoint(session_ids)
                case Released():
                    return self.is_released
            return event.session_id in self.sessions

        return is_needed
