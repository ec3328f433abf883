"""One run in the data plane: its attempts, its runners, and the sessions that they claim and finish.

Joins router, rollout manager and journal. Owns which sessions runners and agents work on. The results of
finished ones are in results.py, their turns in turns/. Speaks no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from sf_core.dataplane.bodies import (
    ClaimBody,
    FinishBody,
    PauseMode,
    RewardBody,
    RunSpec,
    TaskName,
)
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.errors import RETRY_AFTER_S, ApiError
from sf_core.dataplane.journal.journal import Compaction, Journal
from sf_core.dataplane.options import DataplaneOptions
from sf_core.dataplane.routing.router import Router
from sf_core.dataplane.routing.wait_queue import Limits
from sf_core.dataplane.runs import events
from sf_core.dataplane.runs.effects import Effects
from sf_core.dataplane.runs.endings import Closing, Endings, fault_of, time_of
from sf_core.dataplane.runs.events import RunEvent, read_event
from sf_core.dataplane.runs.groups import Group
from sf_core.dataplane.runs.restored import RestoredManager
from sf_core.dataplane.runs.results import RecentResults, Results, TokenRate
from sf_core.dataplane.runs.runners import Judging, Runner, Runners
from sf_core.dataplane.sessions.claims import Claim, SessionSlot
from sf_core.dataplane.sessions.finished import FinishedSession, finish_session
from sf_core.dataplane.sessions.memory import Memory
from sf_core.dataplane.sessions.session import Session
from sf_core.dataplane.signals import Signal
from sf_core.dataplane.turns.live_turn import LiveTurns
from sf_core.recipes.outcomes import Outcome
from sf_core.types import WeightsRef

log = logging.getLogger(__name__)

RUNNER_SILENCE_S = 15.0
"""A runner not heard from for this long loses its sessions."""


def limits_of(spec: RunSpec) -> Limits:
    return Limits(spec.max_waiting, spec.rollout.request_patience_s, spec.engine_silence_s)


class ServedRun:
    def __init__(
        self,
        spec: RunSpec,
        renderer: Renderer,
        journal: Journal,
        grace_s: float = DataplaneOptions.grace_s,
        memory: Memory | None = None,
    ) -> None:
        self.spec, self.renderer, self.journal = spec, renderer, journal
        self.router = Router(WeightsRef(spec.version, spec.weights_uri), limits_of(spec), renderer.num_ids)
        self.grace_s, self.memory = grace_s, memory or Memory()
        self.released = False
        """The run is over, unless another attempt of its flow goes on with it."""
        self.sessions: dict[str, Session] = {}
        """Open sessions, by id."""
        self.counters: Counter[str] = Counter()
        self.turns = LiveTurns(
            *(spec, renderer, self.router, journal, grace_s, self.memory, self.counters, self.sessions),
            self._note_started,
        )
        self.manager = self._new_manager()
        self.results = Results(self.memory)
        self.closing = Closing()
        self.effects = Effects(self)
        self.endings = Endings(self)
        self.runners = Runners()
        self.judging = Judging(self)
        self.answers: dict[int, dict[str, Any]] = {}
        """Answers to the seals of batches before a restart, by batch, to be repeated on request."""
        self.revoked_leases: set[str] = set()
        self.lease_epochs: dict[str, int] = {}
        """Highest epoch per lease that has said hello: Dask may restart a lease while it still runs."""
        self.changed = Signal()
        """Notified when something has happened that a long poll may wait for."""
        self.memory.watchers.add(self.changed)
        self.fault = ""
        """Why the flow has to end, in one sentence; empty if nothing is wrong. Nothing is given out from then
        on until another attempt begins, by which it may be mended."""
        self.stage: dict[str, Any] = {}
        self.meter = TokenRate()
        self.outcomes = RecentResults()
        self.serving_s = 0.0
        """Seconds in which an engine served and turns were recorded: the clock of session timeouts."""

    # --- registration

    def begin_attempt(self, spec: RunSpec) -> None:
        """Begin another attempt of the flow, or the same again: finished sessions are kept; another attempt
        gives out running ones again, whose runners belong to an earlier one. Raises ApiError 409."""
        if spec.attempt < self.spec.attempt:
            raise ApiError.superseded(spec.run_id, spec.attempt)
        if spec.attempt > self.spec.attempt:
            for session in [s for s in self.sessions.values() if not s.is_external]:
                self._lose(session)
                if session.session_id in self.sessions and spec.judges_groups != self.spec.judges_groups:
                    self._take_back(session, "answers are scored in another way from now on")
            self.outcomes.forget_failures()
            self.manager.dropped_in_a_row.clear()
            self.fault = ""
        self.spec = self.turns.spec = spec
        self.released = False
        self.router.closed, self.router.limits = None, limits_of(spec)
        self.manager.set_rules(spec.rollout, spec.lag_bound, spec.num_batches)
        if spec.version > self.router.weights.version:
            self.router.weights = WeightsRef(spec.version, spec.weights_uri)
        self.manager.set_version(spec.version)
        self.changed.notify()

    def forget_progress(self, outcomes: Iterable[Outcome]) -> None:
        """Start over from the progress that the flow has stated in `spec`, with these outcomes of the
        iterations before."""
        for session in [s for s in self.sessions.values() if not s.is_external]:
            self._take_back(session, "the run starts over")
        rejected = self._reject_outside("started_over")
        self.answers.clear()
        self.router.weights = WeightsRef(self.spec.version, self.spec.weights_uri)
        evaluations = self.manager.evaluations
        self.manager = self._new_manager()
        self.manager.tasks.observe(outcomes)
        self.manager.evaluations = {v: group for v, group in evaluations.items() if v <= self.spec.version}
        for event in rejected:
            self.effects.apply(event)
        for place in [place for place in self.results.by_place if place.split == "train"]:
            self.results.drop(place)
        self.results.cut.clear()

    def knows_batch(self, batch: int) -> bool:
        """Whether a flow whose next batch is this one can go on with the groups here; it may have missed the
        answer to the last seal."""
        manager = self.manager
        return batch == manager.next_batch or (batch == manager.next_batch - 1 and batch in manager.batches)

    def _new_manager(self) -> RestoredManager:
        spec = self.spec
        return RestoredManager(
            spec.rollout,
            spec.lag_bound,
            spec.num_batches,
            next_batch=spec.iteration,
            version=spec.version,
            done_groups=spec.done_groups,
            first_attempt=spec.first_attempt,
            seed=spec.seed,
        )

    # --- runners and their sessions

    async def claim(self, body: ClaimBody) -> tuple[list[Session], bool]:
        """Sessions for a runner, and whether it is released. Waits for some; is a sign of life of the runner.
        Sessions with an answer are to be scored."""
        attempt = self.spec.attempt if body.attempt is None else body.attempt
        runner = self.runners.setdefault(body.runner, Runner(attempt, work=body.work))
        if body.running is not None:
            named = set(body.running)
            for session in self._sessions_of(body.runner):
                if session.session_id not in named:
                    self._lose(session)
        sessions: list[Session] = []
        runner.num_polls += 1
        try:
            await self._note_tasks(body.tasks)
            for answered in (self.sessions.get(session_id) for session_id in body.answered):
                # the answer itself may have come before
                if answered is not None and answered.answer is None and not answered.is_external:
                    answered.began_at = math.inf
            await self.changed.until(
                lambda: self._is_released(body.runner) or self._give_out(body.runner, body.max, sessions),
                body.wait_s,
            )
        finally:
            runner.num_polls -= 1
            runner.silent_s = 0.0
        if opened := [session for session in sessions if session.answer is None]:
            self.note_admitted(session.claim.place.group for session in opened if session.claim is not None)
            # if this is refused, the runner does not name them in its next claim, and they are taken back
            await self.journal.attend(self.journal.append(events.Opened.of(opened)))
        return sessions, self._is_released(body.runner)

    def note_admitted(self, indices: Iterable[int]) -> None:
        """Record what the groups are whose first sessions, or whose end, are recorded next."""
        if not self.spec.rollout.chooses:
            return
        for index in indices:
            group = self.manager.groups.get(index)
            if group is not None and group.pick is not None and not group.is_recorded:
                group.is_recorded = True
                self.journal.note(events.Admitted(index, group.pick, group.version))

    async def _note_tasks(self, tasks: Mapping[str, TaskName]) -> None:
        """Record the tasks of sessions: rows of a session that its runner does not end need them too."""
        recording = []
        for session_id, task in tasks.items():
            session = self.sessions.get(session_id)
            if session is not None and not session.is_external:
                named = events.Named(session_id, task.task_id, task.environment)
                self.effects.apply(named)
                recording.append(self.journal.append_chunk(named))
                self.endings.refuse_other_task(session)
        if recording:
            await self.journal.attend(asyncio.gather(*recording))

    def retire(self, name: str) -> None:
        """Release this runner once it has finished its sessions. Raises ApiError 404."""
        self.runners.retire(name)
        self.changed.notify()

    @property
    def is_scored_elsewhere(self) -> bool:
        """Whether agent runners leave the scoring to reward runners."""
        return self.runners.of("reward", self.spec.attempt) > 0

    def ended(self, session_ids: list[str]) -> list[str]:
        return [session_id for session_id in session_ids if session_id not in self.sessions]

    def _is_released(self, name: str) -> bool:
        runner = self.runners[name]
        is_through = runner.is_retiring and not self._sessions_of(name)
        return self.released or runner.attempt < self.spec.attempt or is_through

    def _give_out(self, runner: str, limit: int, sessions: list[Session]) -> bool:
        if self.runners[runner].is_retiring or self.journal.failure is not None or self.fault:
            return False
        work = self.runners[runner].work
        if work == "reward" or not self.is_scored_elsewhere:
            sessions += self.runners.take_answers(runner, limit, self.sessions)
            sessions += self.judging.take(runner, limit - len(sessions))
        free = max(0, limit - len(sessions))
        claims = self.manager.claim(free, self.memory.is_full) if work == "agent" else ()
        for claim in claims:
            session = Session(claim.session_id(self.spec.run_id), claim, runner=runner)
            self.open(session)
            sessions.append(session)
        return bool(sessions)

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
        if session.is_external or not self.spec.rollout.prepare_ahead:
            session.began_at = self.serving_s
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

    def count(self, name: str, number: int = 1) -> None:
        """Add to a counter of the run."""
        self.counters[name] += number

    def _note_started(self, claim: Claim, version: int) -> None:
        self.manager.note_started(claim, version)

    @property
    def unfinished(self) -> set[str]:
        """Ids of sessions whose end the journal does not hold."""
        return self.sessions.keys() | self.closing.keys()

    async def compact(self, choose: Callable[[], Compaction[RunEvent]]) -> None:
        """See Journal.compact."""
        await self.journal.compact(read_event, choose)

    async def record(self, event: RunEvent) -> None:
        """Do what an event does; returns when the event is on disk."""
        self.effects.apply(event)
        await self.journal.append(event)

    async def reward(self, session: Session, body: RewardBody) -> None:
        if refusal := fault_of(body, session):
            raise refusal
        given = body.reward, body.reward_parts, body.step_rewards
        await self.record(events.Rewarded(session.session_id, *given))

    async def finish(self, session: Session, body: FinishBody) -> None:
        """End a session as its agent or runner reports. Returns when the result is on disk. Raises ApiError
        503 while the result of an earlier report is not."""
        with self.closing.holding(session):
            if self.sessions.get(session.session_id) is session:  # else it ended before this report came
                await self.endings.end(session, body)

    def take_out(self, session: Session, report: FinishBody) -> FinishedSession:
        """Stop serving a session and return its result. Raises whatever its export raises."""
        self.drop(session, report.parting)
        self.turns.set_aside_unanswered(session)
        return finish_session(self.spec, session, report, self.renderer.stop_token_ids)

    async def reject(self, indices: list[int]) -> None:
        """Count and record groups that an event has rejected."""
        rejected = [events.Rejected(index, self.manager.rejected[index]) for index in indices]
        self.counters.update(f"rejected_groups.{event.reason}" for event in rejected)
        for event in rejected:
            await self.journal.append(event)
        if indices:
            self.endings.refuse_endless_drops()

    def counts(self, session: Session) -> bool:
        """Whether the session is of a group that a batch or an evaluation may take."""
        return session.claim is not None and self.manager.group_of(session.claim) is not None

    def _reject_outside(self, reason: str, only_incomplete: bool = False) -> list[events.Rejected]:
        """Reject the groups from outside; see `reject_all`."""
        groups = [group for group in self.manager.groups.values() if group.is_outside]
        return self.reject_all([g for g in groups if not (only_incomplete and g.is_complete)], reason)

    def reject_all(self, groups: list[Group], reason: str) -> list[events.Rejected]:
        """Reject groups, as the events that are returned say."""
        rejected = [events.Rejected(group.index, reason) for group in groups]
        self.note_admitted(group.index for group in groups)
        for event in rejected:
            self.journal.note(event)
            self.effects.apply(event)
        return rejected

    @property
    def is_over(self) -> bool:
        """Whether it is released, has no engine connected, and leaves nothing in the journal alone."""
        return self.released and not (self.router.links or self.unfinished or self.results.opened)

    async def leave(self) -> None:
        """Stop serving the run; its journal and its directory hold all there is of it."""
        self.leave_memory()
        await self.journal.close()

    def leave_memory(self) -> None:
        """Free the memory of its sessions and results."""
        for session_id in list(self.sessions):
            self.forget(session_id)
        self.results.drop_all()
        self.memory.watchers.discard(self.changed)

    def places_of(self, group: int) -> list[SessionSlot]:
        """Places of a group that have a result."""
        places = (SessionSlot("train", group, member) for member in range(self.manager.largest_group))
        return [place for place in places if place in self.results.by_place]

    def results_of(self, groups: Iterable[int]) -> list[FinishedSession]:
        """Results of these groups, in order."""
        return [self.results.by_place[place] for group in groups for place in self.places_of(group)]

    async def start_evaluation(self, version: int, num_tasks: int) -> None:
        await self.record(events.EvaluationStarted(version, num_tasks))
        self.changed.notify()

    def release(self) -> None:
        """End the run: runners are released, sessions end, other requests are refused. If another attempt of
        the flow goes on with it, the places of these sessions are given out again; a group from outside
        counts only if it is complete, and a batch is left."""
        self.released = True
        goes_on = self.manager.next_batch < self.spec.num_batches
        self._reject_outside("run_released", only_incomplete=goes_on)
        for session in list(self.sessions.values()):
            self._take_back(session, "the run was released")
        self.router.close(self.refusal())
        self.changed.notify()

    async def sweep(self, elapsed_s: float) -> None:
        """Sweep the router, silent runners and sessions that run too long; called once a second."""
        self.router.sweep()
        # sessions do not age while their agents are refused
        if self.router.is_serving and self.journal.failure is None:
            self.serving_s += elapsed_s
        for name in self.runners.take_silent(elapsed_s, RUNNER_SILENCE_S):
            log.warning("runner %s is silent: its sessions are given out again", name)
            for session in self._sessions_of(name):
                self._lose(session)
        rules = self.spec.rollout
        expired = [s for s in self.sessions.values() if s.began_at + time_of(s, rules) < self.serving_s]
        ending = (self.endings.expire(s) for s in expired if s.session_id not in self.closing)
        await asyncio.gather(*ending)

    async def revoke(self, lease_id: str) -> None:
        """Accept no engine of this lease from now on."""
        await self.record(events.Revoked(lease_id))

    async def pause(self, mode: PauseMode, engine_id: str | None) -> int:
        """See Router.pause; the pause outlives this process. Raises ApiError 404 for an unknown engine."""
        if engine_id is not None:
            self.router.find(engine_id)
        recorded = self.journal.append(events.Paused(engine_id))
        _, num_engines = await asyncio.gather(recorded, self.router.pause(mode, engine_id))
        return num_engines

    async def resume(self, engine_id: str | None) -> None:
        await self.record(events.Resumed(engine_id))

    def _sessions_of(self, runner: str) -> list[Session]:
        return [s for s in self.sessions.values() if s.claim is not None and s.runner == runner]

    def _lose(self, session: Session) -> None:
        """Free the place or the answer of a session whose runner is gone or did not name it, for another."""
        if session.answer is not None:
            if session.runner and self.judging.includes(session):
                self.judging.lose(session)
            elif session.runner:
                self.runners.await_reward(session)
            self.changed.notify()
            return
        self._take_back(session, "the session was given to another runner")
        self.counters["retries"] += 1
        self.changed.notify()

    def _take_back(self, session: Session, reason: str) -> None:
        self.drop(session, reason)
        if session.claim is not None:
            lost = events.Lost(session.claim)
            self.effects.apply(lost)
            self.journal.note(lost)
