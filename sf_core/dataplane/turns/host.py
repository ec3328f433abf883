"""What a run is to its turns: its open sessions, and what serves them.

Owns which sessions a request may name and what becomes of them: turns while they are open, trajectories when
they end. Knows nothing of groups and runners, which the run adds (runs/run.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from sf_core.config.failures import Status
from sf_core.dataplane.bodies import FinishBody, RunSpec
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.errors import RETRY_AFTER_S, ApiError
from sf_core.dataplane.journal.journal import Journal
from sf_core.dataplane.routing.pace import Pace
from sf_core.dataplane.routing.router import Router
from sf_core.dataplane.sessions.claims import Claim
from sf_core.dataplane.sessions.export import export_session
from sf_core.dataplane.sessions.finished import FinishedSession
from sf_core.dataplane.sessions.memory import Memory
from sf_core.dataplane.sessions.session import Session
from sf_core.dataplane.sessions.turn_events import Ended, Overflowed, Sampled, TurnEvent, replay

if TYPE_CHECKING:
    from sf_core.dataplane.turns.retries import InFlightTurn


class TurnHost:
    def __init__(
        self,
        spec: RunSpec,
        renderer: Renderer,
        journal: Journal,
        router: Router,
        grace_s: float,
        memory: Memory,
        note_started: Callable[[Claim, int], None],
    ) -> None:
        """`note_started` is told of every claimed session a policy version that may have sampled in it."""
        self.spec = spec
        self.renderer = renderer
        self.journal = journal
        self.router = router
        self.grace_s = grace_s
        self.memory = memory
        self.note_started = note_started
        self.pace = Pace()
        self.released = False
        """The run is over, unless another attempt of its flow goes on with it."""
        self.sessions: dict[str, Session] = {}
        self.in_flight: dict[str, list[InFlightTurn]] = {}
        """Turns in flight, or whose answer a client is still being sent, by session id; see retries.py."""
        self.counters: Counter[str] = Counter()

    @property
    def is_complete(self) -> bool:
        """Whether all iterations are done. A run that only evaluated has none."""
        return 0 < self.spec.num_batches <= self.router.weights.version

    def refusal(self) -> ApiError:
        """What requests are told once the run is released."""
        why = f"all of its {self.spec.num_batches} iterations are done"
        if not self.is_complete:
            why = "no flow works on it until one is started again"
        message = f"Run {self.spec.run_id} has ended: {why}; `sf serve RUN` serves its policy."
        retry_after_s = None if self.is_complete else RETRY_AFTER_S
        return ApiError(503, message, code="run_over", retry_after_s=retry_after_s)

    def open(self, session: Session) -> None:
        """Serve this session from now on."""
        if session.claim is not None and session.claim.place.split == "holdout":
            session.floor = session.claim.place.group
        self.sessions[session.session_id] = session
        self.memory.add(session)

    def forget(self, session_id: str) -> None:
        if (session := self.sessions.pop(session_id, None)) is not None:
            self.memory.remove(session)

    def drop(self, session: Session, reason: str) -> None:
        """Stop serving a session; clients that still wait for a turn of it are told the reason."""
        self.forget(session.session_id)
        for name, number in session.branch_reasons.items():
            self.count(f"branches.{name}", number)
        self.count("abandoned_turns", session.num_unfinished)
        for generation in list(session.running):
            self.router.cancel(generation, reason)

    async def note_overflow(self, session: Session) -> None:
        """A request of this session did not fit into the context window. Raises ApiError 503 while the
        journal cannot be written."""
        if self.sessions.get(session.session_id) is session and not session.has_overflowed:
            session.has_overflowed = True
            await self.journal.attend(self.journal.append_chunk(Overflowed(session.session_id)))

    def recover_turn(self, event: TurnEvent) -> None:
        """Apply an event of a turn from the journal, unless its session is over."""
        if (session := self.sessions.get(event.session_id)) is None:
            return
        versions = event.tokens.versions if isinstance(event, Sampled | Ended) else ()
        if len(versions) and session.claim is not None:
            self.note_started(session.claim, int(min(versions)))
        replay(session, event)
        self.memory.weigh(session)

    def export(self, session: Session, report: FinishBody) -> FinishedSession:
        """The result of a dropped session. The report has a reward, even for a failure."""
        assert report.reward is not None
        served = [turn.known for turn in self.in_flight.get(session.session_id, ())]
        self.count("abandoned_turns", session.set_aside_unanswered(served))
        status = status_of(session, report)
        trajectories = export_session(
            session,
            policy=self.spec.served_model,
            group_id=self._group_id(session),
            stop_ids=self.renderer.stop_token_ids,
            task_id=report.task_id or session.task_id,
            environment=report.environment or session.environment,
            reward=report.reward,
            reward_parts={name: part for name, part in report.reward_parts.items() if part is not None},
            steps={
                turn: step
                for answer, step in report.step_rewards.items()
                if step is not None and (turn := session.turn_named(answer)) is not None
            },
            status=status,
            output=report.output,
        )
        versions = [turn.versions for turn in session.turns if len(turn.versions)]
        session.release()
        return FinishedSession(
            session.session_id,
            session.claim,
            report.reward,
            report.environment or session.environment,
            min((int(sampled.min()) for sampled in versions), default=None),
            max((int(sampled.max()) for sampled in versions), default=None),
            trajectories,
            status,
        )

    def _group_id(self, session: Session) -> str | None:
        if (claim := session.claim) is None:
            return session.group
        return f"{self.spec.run_id}.g{claim.place.group}" if claim.place.split == "train" else None

    def count(self, name: str, number: int = 1) -> None:
        """Add to a counter of the run."""
        self.counters[name] += number


def status_of(session: Session, report: FinishBody) -> Status:
    """How a session ended. A failure that the policy may have caused shows in the last
    request: its prompt did not fit, or its answer had a call that could not be parsed."""
    if report.status == "finished":
        return "finished_after_overflow" if session.has_overflowed else "finished"
    match report.cause:
        case "time":
            return "timeout"
        case "prepare":
            return "prepare_error"
        case "reward":
            return "reward_error"
        case "code":
            return "agent_error"
    if session.has_overflowed:
        return "context_overflow"
    return "unparsed_call" if session.turns and session.turns[-1].num_unparsed_calls else "agent_error"
