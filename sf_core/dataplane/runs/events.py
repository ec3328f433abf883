"""Events of runs, as journals hold them. What they do is in state.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from sf_core.config.failures import Reason
from sf_core.dataplane.bodies import RunSpec
from sf_core.dataplane.journal.events import Event, reader
from sf_core.dataplane.runs.ledger import Batch
from sf_core.dataplane.sessions.claims import Claim
from sf_core.dataplane.sessions.finished import FinishedSession, JudgedSession
from sf_core.dataplane.sessions.session import Session
from sf_core.dataplane.sessions.turn_events import TurnEvent
from sf_core.recipes.outcomes import Pick
from sf_core.types import WeightsRef
from storage.tables.judgements import Judgement


class Registered(Event):
    """A flow registered the run; the first event of every journal."""

    spec: RunSpec
    num_processes: Literal[1] = 1
    """Number of processes that record its turns. A journal that names more is refused: its turns are in other
    files, which no code reads any more (docs/decisions/041)."""


class Published(Event):
    weights: WeightsRef


class EvaluationStarted(Event):
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


class Opened(Event):
    """Sessions were given to a runner, or opened for external agents."""

    facts: list[OpenedSession]

    def sessions(self) -> list[Session]:
        return [Session(**msgspec.structs.asdict(opened)) for opened in self.facts]


class Rewarded(Event):
    """A reward was reported for a session that stays open."""

    session_id: str
    reward: float
    parts: dict[str, float]
    steps: dict[str, float] = msgspec.field(default_factory=dict)


class Named(Event):
    """The agent of a session has begun, on this task."""

    session_id: str
    task_id: str
    environment: str


class Answered(Event):
    """The agent of a session is done, and its answer is to be scored."""

    session_id: str
    answer: str
    output: str | None = None


class Unjudged(Event):
    """An answer, or all answers of its group, could not be judged and is to be scored again."""

    session_id: str
    error: str
    judgements: list[Judgement]


class Closed(Event):
    """An external session ended without a result."""

    session_id: str


class Finished(Event):
    result: FinishedSession


class Judged(Finished):
    """A session finished for whose reward judges were asked."""

    result: JudgedSession


class Failed(Event):
    claim: Claim
    reason: Reason
    error: str = ""


class Lost(Event):
    """The session's runner is gone; its place is open again."""

    claim: Claim


class Admitted(Event):
    """A group of a run that chooses was begun, with this task; told before its first session."""

    group: int
    pick: Pick
    version: int


class Rejected(Event):
    group: int
    reason: str


class Sealed(Event):
    index: int
    batch: Batch
    answer: dict[str, Any]


class Stored(Event):
    """The rows of finished external sessions are in the run directory."""

    session_ids: list[str]


class Revoked(Event):
    lease_id: str


class Paused(Event):
    engine_id: str | None
    """None: the run."""


class Resumed(Event):
    engine_id: str | None


class Released(Event):
    pass


RunEvent = (
    Registered | Published | EvaluationStarted | Admitted | Opened | Rewarded | Named | Answered | Unjudged
    | Closed | Finished | Judged | Failed | Lost | Rejected | Sealed | Stored | Revoked | Paused | Resumed
    | Released | TurnEvent
)  # fmt: skip


def finished(result: FinishedSession) -> Finished:
    """The event of a session's end."""
    return Judged(result) if isinstance(result, JudgedSession) else Finished(result)


read_event: Callable[[bytes], RunEvent] = reader(RunEvent)
