"""One run in the data plane: its state, its journal, its router and its runners.

Whatever happens is recorded and applied by `record`. What runners ask is in claiming.py, how sessions end in
endings.py, what the flow asks at the end of a batch in sealing.py. Speaks no HTTP.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from typing import Any

from sf_core.dataplane.api_schemas import PauseMode, RunSpec
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.conditions import Condition
from sf_core.dataplane.errors import RETRY_AFTER_S, ApiError
from sf_core.dataplane.journal.journal import Journal
from sf_core.dataplane.journal.ownership import Fence, NotOwnedError
from sf_core.dataplane.media import Media
from sf_core.dataplane.options import DataplaneOptions
from sf_core.dataplane.routing.router import Router
from sf_core.dataplane.routing.wait_queue import QueueLimits
from sf_core.dataplane.runs import decide, events
from sf_core.dataplane.runs.decide import Readiness
from sf_core.dataplane.runs.events import OpenedSession, RunEvent, read_event
from sf_core.dataplane.runs.groups import Group
from sf_core.dataplane.runs.results import TokenRate
from sf_core.dataplane.runs.runners import Effort, Runners
from sf_core.dataplane.runs.state import RunState
from sf_core.dataplane.sessions.claims import Claim
from sf_core.dataplane.sessions.memory_budget import MemoryBudget
from sf_core.dataplane.sessions.session import Session
from sf_core.dataplane.turns.live_turn import LiveTurns
from sf_core.types import WeightsRef
from storage.files import is_local
from storage.run_directory import RunDirectory

REGISTRATION_S = 10.0
"""Seconds after the beginning of an attempt in which its flow may still register it at this data plane."""


def limits_of(spec: RunSpec) -> QueueLimits:
    return QueueLimits(spec.max_waiting, spec.rollout.request_patience_s, spec.engine_silence_s)


class Closing(dict[str, Session]):
    """Sessions whose end is being recorded, by id."""

    def check(self, session_id: str) -> None:
        """Raises ApiError 503 for such a session: a second report of its end must be told neither that the
        session is unknown nor that its end is recorded."""
        if session_id in self:
            raise ApiError(
                503,
                f"The end of session {session_id} is being recorded: send this request again later.",
                code="being_recorded",
                retry_after_s=RETRY_AFTER_S,
            )

    @contextmanager
    def holding(self, session: Session) -> Iterator[None]:
        """Contain a session while its end is recorded. Raises ApiError as `check` does."""
        self.check(session.session_id)
        self[session.session_id] = session
        try:
            yield
        finally:
            del self[session.session_id]


class ServedRun:
    def __init__(
        self,
        state: RunState,
        renderer: Renderer,
        journal: Journal,
        grace_s: float = DataplaneOptions.grace_s,
    ) -> None:
        self.state = state
        self.renderer = renderer
        self.journal = journal
        self.router = Router(state.weights, limits_of(state.spec), renderer.num_ids)
        self.router.paused |= state.paused
        if state.released:
            self.router.close(self.refusal())
        self.turns = LiveTurns(
            state.spec,
            renderer,
            Media(RunDirectory(state.spec.run_dir).media_dir),
            self.router,
            journal,
            grace_s,
            state.memory,
            state.counters,
            state.sessions,
            self.note_started,
        )
        self.runners = Runners()
        self.closing = Closing()
        directory = RunDirectory(state.spec.run_dir)
        self._shares_journal = is_local(directory.uri)
        """Whether another data plane would open the same journal."""
        self._fence = Fence(lambda: directory.is_superseded(self.spec.attempt))
        self._superseded: int | None = None
        """The attempt that a later one at another data plane has superseded."""
        self.lease_epochs: dict[str, int] = {}
        """Highest epoch per lease that has said hello: Dask may restart a lease while it still runs."""
        self.changed = Condition()
        """Notified when something has happened that a long poll may wait for."""
        state.memory.watchers.add(self.changed)
        self.fault = ""
        """Why the flow has to end, in one sentence; empty if nothing is wrong. Nothing is given out from then
        on until another attempt begins, by which it may be mended."""
        self.stage: dict[str, Any] = {}
        self.meter = TokenRate()
        self.effort = Effort()

    @property
    def spec(self) -> RunSpec:
        return self.state.spec

    @property
    def memory(self) -> MemoryBudget:
        return self.state.memory

    @property
    def sessions(self) -> dict[str, Session]:
        return self.state.sessions

    @property
    def counters(self) -> Counter[str]:
        return self.state.counters

    @property
    def released(self) -> bool:
        return self.state.released

    @property
    def is_complete(self) -> bool:
        """Whether all iterations are done. A run that only evaluated has none."""
        return 0 < self.spec.num_batches <= self.state.weights.version

    @property
    def is_at_rest(self) -> bool:
        """Whether it is released and leaves nothing in the journal alone."""
        return self.released and not (self.sessions or self.closing or self.state.results.external)

    @property
    def is_over(self) -> bool:
        """Whether it is at rest, or its journal is another process's, and no engine is connected."""
        return (self.is_at_rest or self.journal.is_lost) and not self.router.engines

    def refusal(self) -> ApiError:
        """What requests are told once the run is released."""
        why = f"all of its {self.spec.num_batches} iterations are done"
        if not self.is_complete:
            why = "its flow has stopped and can be started again"
        message = f"Run {self.spec.run_id} has ended: {why}; `sf serve RUN` serves its policy."
        retry_after_s = None if self.is_complete else RETRY_AFTER_S
        return ApiError(503, message, code="run_over", retry_after_s=retry_after_s)

    # --- what happens

    def record(self, event: RunEvent) -> None:
        """Note an event in the journal and do what it does. What that means is told to nobody before the
        journal is flushed."""
        self.journal.append_later(event)
        for session, reason in self.state.apply(event):
            self.part(session, reason)

    async def record_now(self, event: RunEvent) -> None:
        """Do what an event does; returns when the event is on disk."""
        self.record(event)
        await self.journal.flush()

    async def confirm(self) -> None:
        """Returns once it is certain that no later attempt had begun at another data plane when what was
        recorded before this call was on disk. Raises ApiError 409 if one had, and 503 if it is unknown."""
        if self._shares_journal and self.journal.is_exclusive:
            return
        self.refuse_superseded()
        attempt = self.spec.attempt
        if not await self._fence.is_superseded():
            return
        # perhaps its flow is about to register it here
        if await self.changed.until(lambda: self.spec.attempt > attempt, REGISTRATION_S):
            return await self.confirm()
        self._superseded = attempt
        if self._shares_journal:
            # the other data plane has read it, and goes on from it
            sentence = ApiError.superseded(self.spec.run_id, attempt).message.removesuffix(".")
            await self.journal.give_up(NotOwnedError(sentence, "superseded"))
        self.refuse_superseded()

    async def refuse_taken_over(self) -> None:
        """Raises ApiError 409 if a later attempt at another data plane may have gone on with this journal."""
        shares = self._shares_journal and not self.journal.is_exclusive
        if shares and await self._fence.is_superseded():
            raise ApiError.superseded(self.spec.run_id, self.spec.attempt)

    def refuse_superseded(self) -> None:
        """Raises ApiError 409 if it is known that a later attempt works at another data plane."""
        if self._superseded == self.spec.attempt:
            raise ApiError.superseded(self.spec.run_id, self.spec.attempt)

    async def compact(self) -> None:
        """See Journal.compact."""
        await self.journal.compact(read_event, lambda: self.state.snapshot())

    def readiness(self, batch: int) -> Readiness:
        """How far a batch is. What is done counts as done once it is on disk."""
        ready = decide.readiness(self.state.ledger, batch)
        if ready.ready and self.journal.failure is not None:
            return replace(ready, ready=False, waiting_for="the journal to be written")
        return ready

    def pass_time(self, seconds: float) -> None:
        """Let sessions grow older."""
        self.effort.record_engines(self.router.engines)
        # they do not age while their agents are refused
        if self.router.is_serving and self.journal.failure is None:
            self.state.serving_s += seconds

    def note_started(self, claim: Claim, version: int) -> None:
        self.state.ledger.note_started(claim, version)

    def take_over(self, state: RunState) -> None:
        """Go on with this state, in which another attempt of the flow is registered."""
        self.state = state
        self.turns.spec = state.spec
        self.router.closed = None
        self.router.limits = limits_of(state.spec)
        self.router.weights = state.weights
        self.changed.notify()

    # --- what every part of a run does with its sessions and groups

    def take_back(self, session: Session, reason: str) -> None:
        """Free the place of a session."""
        self.part(session, reason)
        if session.claim is not None:
            self.record(events.Lost(session.claim))

    def part(self, session: Session, reason: str) -> None:
        """End the turns of a session; clients that still wait for one of them are told the reason."""
        for name, number in session.branch_reasons.items():
            self.counters[f"branches.{name}"] += number
        self.counters["abandoned_turns"] += session.num_unfinished
        for generation in list(session.running):
            self.router.cancel(generation, reason)

    def sessions_of(self, runner: str) -> list[Session]:
        return [s for s in self.sessions.values() if s.claim is not None and s.runner == runner]

    def open(self, facts: list[OpenedSession]) -> list[Session]:
        """Open sessions, in one event for each group, which is needed no longer than its group."""
        for _, sessions in groupby(facts, lambda session: session.claim and session.claim.slot[:2]):
            self.record(events.Opened(list(sessions)))
        return [self.sessions[fact.session_id] for fact in facts]

    def reject(self, indices: Iterable[int], reason: str) -> None:
        """Reject groups."""
        for index in indices:
            self.record(events.Rejected(index, reason))
            self.counters[f"rejected_groups.{reason}"] += 1

    def reject_halves(self, groups: Iterable[Group]) -> bool:
        """Reject those groups of which some answers were scored and the others have lost their judge."""
        halves = [g.index for g in groups if g.is_half_judged] if self.spec.judges_groups else []
        self.reject(halves, "half_judged")
        return bool(halves)

    def reject_external(self, reason: str, only_incomplete: bool = False) -> list[int]:
        """Reject the external groups. Returns their indices."""
        external = [group for group in self.state.ledger.groups.values() if group.is_external]
        rejected = [group.index for group in external if not (only_incomplete and group.is_complete)]
        self.reject(rejected, reason)
        return rejected

    def end_by(self, fault: str, reason: str, groups: Iterable[Group]) -> None:
        """Have the flow end with this sentence, and reject the groups that it is about: an attempt in which
        it is mended begins new ones."""
        self.fault = self.fault or fault
        self.reject([group.index for group in groups], reason)
        self.changed.notify()

    # --- commands of the flow

    async def start_evaluation(self, version: int, num_tasks: int) -> None:
        await self.record_now(events.EvaluationStarted(version, num_tasks))
        self.changed.notify()

    async def publish(self, weights: WeightsRef) -> dict[str, int]:
        """Have every engine take these weights. Returns the version that each of them holds then."""
        self.record(events.Published(weights))
        self.router.weights = weights
        await self.journal.flush()
        reloaded = await self.router.update(weights)
        # from now on no engine samples with an older version
        self.state.ledger.set_version(weights.version)
        self.changed.notify()
        return reloaded

    def release(self) -> None:
        """End the run: runners are released, sessions end, other requests are refused. If another attempt of
        the flow goes on with it, the places of these sessions are given out again; an external group
        counts only if it is complete, and a batch is left."""
        goes_on = self.state.ledger.next_batch < self.spec.num_batches
        self.reject_external("run_released", only_incomplete=goes_on)
        for session in [s for s in self.sessions.values() if s.claim is not None]:
            self.take_back(session, "the run was released")
        self.record(events.Released())
        self.router.close(self.refusal())
        self.changed.notify()

    async def leave(self) -> None:
        """Stop serving the run; its journal and its directory hold all there is of it."""
        self.state.free_memory()
        self.memory.watchers.discard(self.changed)
        await self.journal.close()

    async def revoke(self, lease_id: str) -> None:
        """Accept no engine of this lease from now on."""
        await self.record_now(events.Revoked(lease_id))

    async def pause(self, mode: PauseMode, engine_id: str | None) -> int:
        """See Router.pause; the pause outlives this process. Raises ApiError 404 for an unknown engine."""
        if engine_id is not None:
            self.router.find(engine_id)
        self.record(events.Paused(engine_id))
        _, num_engines = await asyncio.gather(self.journal.flush(), self.router.pause(mode, engine_id))
        return num_engines

    async def resume(self, engine_id: str | None) -> None:
        self.record(events.Resumed(engine_id))
        self.router.resume(engine_id)
        await self.journal.flush()
