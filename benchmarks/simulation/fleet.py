"""Engines and the sessions on them, on an event clock: how long the data plane and its engines take.

A session is a sequence of turns, one request each, with its agent's tool calls in between. The pace of
engines, continuous batching, the prefixes kept of ended turns and the order of requests are those of the
emulated engine and the router; tokens are only counted.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from typing import NamedTuple

from benchmarks.emulation.continuous_batch import ContinuousBatch, Slot
from benchmarks.emulation.device_model import DeviceModel
from benchmarks.emulation.kept_prefixes import KeptPrefixes
from benchmarks.simulation.clock import EventClock
from sf_core.dataplane.control.plane import SWEEP_S
from sf_core.dataplane.routing.choice import expected_remaining
from sf_core.dataplane.routing.rebalancing import EngineQueue, RunningRequest, plan_moves
from sf_core.dataplane.sessions.claims import Claim
from sf_core.scheduling.timeline import Span


class Turn(NamedTuple):
    num_new: int
    """Prompt tokens that the turn before did not have: the task's, or a tool's result."""
    num_wanted: int
    """Tokens to sample."""
    tool_s: float = 0.0
    """Seconds of tool calls until the next turn, on the clock of the emulated devices."""


@dataclass(eq=False, slots=True)
class SimulatedSession:
    claim: Claim
    turns: Sequence[Turn]
    number: int = 0
    """Index of its current turn."""
    arrived: int = 0
    """Arrival number of the turn, its place in the queue; an interrupted turn keeps it."""
    num_prompt: int = 0
    """Prompt tokens of the turn: everything before it."""
    num_wanted: int = 0
    num_sampled: int = 0
    """Tokens of the turn that were sampled before it came to its current engine."""
    num_moved_at: int = 0
    """Its length at the last rebalancing, 0 if the turn was never moved."""
    min_version: int | None = None
    near: SimulatedEngine | None = None
    """The engine that finished its last turn."""
    near_version: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.num_sampled

    @property
    def is_over(self) -> bool:
        return self.number == len(self.turns)


@dataclass(eq=False)
class SimulatedEngine:
    worker: str
    batch: ContinuousBatch
    version: int
    max_running: int
    kept: KeptPrefixes
    running: dict[str, tuple[SimulatedSession, Slot]] = field(default_factory=dict)
    outstanding: int = 0
    """Estimated tokens of its requests: prompts without cached prefixes, and a typical answer each."""
    ticked_at: float = 0.0
    is_gone: bool = False
    busy_since: float | None = None
    num_wakes: int = 0
    """Count of scheduled wake-ups; one with an earlier count is out of date."""
    num_passed: int = 0
    """Tokens sampled for sessions that are no longer on it."""
    serving_since: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens that it has sampled, including those of running sessions."""
        return self.num_passed + sum(self.batch.num_sampled(slot) for _, slot in self.running.values())


class Fleet:
    def __init__(
        self,
        clock: EventClock,
        weight_load_s: float,
        max_running: int,
        *,
        kv_tokens: int,
        recompute: bool,
        typical: float,
        budget: int,
    ) -> None:
        """Turns sample `typical` tokens on average, and `budget` at most."""
        self.engines: list[SimulatedEngine] = []
        self.spans: list[Span] = []
        self.num_moves = 0
        self._looks = False
        """Whether the next rebalancing is scheduled."""
        self.on_answered: Callable[[SimulatedSession], None] = lambda session: None
        """Called when a turn of the session is over and its tokens are part of the session."""
        self.on_started: Callable[[SimulatedSession, int], None] = lambda session, version: None
        self._clock = clock
        self._weight_load_s = weight_load_s
        self._max_running = max_running
        self._recompute = recompute
        self._typical = round(typical)
        self._budget = budget
        self._kv_tokens = kv_tokens
        self._num_arrived = count()
        self._waiting: list[tuple[int, int, SimulatedSession]] = []
        self._roomy: list[tuple[int, int, int, SimulatedEngine]] = []
        """Heap of engines by outstanding tokens; an entry that does not match its engine is out of date."""
        self._order = count()

    def add_engine(self, worker: str, version: int, model: DeviceModel) -> SimulatedEngine:
        kept = KeptPrefixes(self._kv_tokens)
        engine = SimulatedEngine(worker, ContinuousBatch(model), version, self._max_running, kept)
        engine.ticked_at = engine.serving_since = self._clock.now
        self.engines.append(engine)
        self._note_room(engine)
        self._schedule()
        return engine

    def remove_engine(self, engine: SimulatedEngine) -> None:
        """The engine yields: its sessions are queued again with their tokens and continue elsewhere."""
        self._advance(engine)
        engine.is_gone = True
        self.engines.remove(engine)
        for session, slot in engine.running.values():
            session.num_sampled += engine.batch.num_sampled(slot)
            heappush(self._waiting, (session.arrived, id(session), session))
        engine.running.clear()
        self._note_busy(engine)
        self._schedule()

    def drop(self, groups: Container[int]) -> None:
        """End the sessions of these groups, waiting or running."""
        self._waiting = [entry for entry in self._waiting if entry[2].claim.slot.group not in groups]
        heapify(self._waiting)
        for engine in self.engines:
            self._advance(engine)
            for session in [session for session, _ in engine.running.values()]:
                if session.claim.slot.group in groups:
                    self._leave(engine, session)
            self._note_busy(engine)
            self._wake_later(engine)
        self._schedule()

    def submit(self, sessions: list[SimulatedSession]) -> None:
        """Queue the next turn of each session."""
        for session in sessions:
            turn = session.turns[session.number]
            session.arrived = next(self._num_arrived)
            session.num_prompt += session.num_sampled + turn.num_new
            session.num_wanted = turn.num_wanted
            session.num_sampled = 0
            session.num_moved_at = 0
            heappush(self._waiting, (session.arrived, id(session), session))
        self._schedule()

    def set_version(self, version: int) -> None:
        """All engines fetch the new weights beside sampling, and take them when they are there."""
        for engine in self.engines:
            self._clock.after(self._weight_load_s, self._take_weights, engine, version)

    def _take_weights(self, engine: SimulatedEngine, version: int) -> None:
        if engine.is_gone:
            return
        self._advance(engine)
        engine.version = version
        engine.kept.clear()
        if self._recompute and engine.running:
            engine.batch.recompute()
        self._note_busy(engine)
        self._wake_later(engine)

    def _look(self) -> None:
        self._rebalance()
        self._looks = any(engine.running for engine in self.engines)
        if self._looks:
            self._clock.after(SWEEP_S, self._look)

    def _rebalance(self) -> None:
        """Like Router._rebalance, except that a moved request leaves its engine at once."""
        if self._waiting:
            return
        owners = {self._queue(engine): engine for engine in self.engines}
        for session, source, target in plan_moves(list(owners)):
            self._leave(owners[source], session)
            session.num_moved_at = session.num_tokens
            self._take(owners[target], session)
            self.num_moves += 1
        for engine in self.engines:
            self._note_busy(engine)
            self._wake_later(engine)

    def _queue(self, engine: SimulatedEngine) -> EngineQueue[SimulatedSession]:
        self._advance(engine)
        running = [self._running(engine, session, slot) for session, slot in engine.running.values()]
        room = engine.max_running - len(running)
        return EngineQueue(sum(r.num_to_do for r in running), room, lambda: running)

    def _running(
        self, engine: SimulatedEngine, session: SimulatedSession, slot: Slot
    ) -> RunningRequest[SimulatedSession]:
        sampled = session.num_sampled + engine.batch.num_sampled(slot)
        rest = expected_remaining(self._typical, sampled, self._budget - sampled)
        num_prefill = 0 if engine.batch.num_sampled(slot) else slot.num_prompt - slot.num_cached
        return RunningRequest(session, session.num_prompt + sampled, num_prefill + rest, session.num_moved_at)

    def _leave(self, engine: SimulatedEngine, session: SimulatedSession) -> None:
        _, slot = engine.running.pop(str(id(session)))
        num_sampled = engine.batch.num_sampled(slot)
        session.num_sampled += num_sampled
        engine.num_passed += num_sampled
        engine.batch.leave(slot)
        engine.outstanding -= slot.num_prompt - slot.num_cached + self._typical
        self._note_room(engine)

    def finish(self) -> None:
        """Record the spans that are still open."""
        for engine in self.engines:
            self._end_busy(engine)

    def _schedule(self) -> None:
        """Dispatch waiting requests, in order of arrival, each to the engine that would finish it first
        (choose in routing/choice.py). Here a request counts with its initial estimate until it leaves; the
        router counts it down as tokens arrive."""
        touched: dict[int, SimulatedEngine] = {}
        while self._waiting and (roomiest := self._roomiest()) is not None:
            _, _, session = heappop(self._waiting)
            engine = self._nearest(session, roomiest)
            if id(engine) not in touched:
                self._advance(engine)
                touched[id(engine)] = engine
            self._take(engine, session)
        for engine in touched.values():
            self._note_busy(engine)
            self._wake_later(engine)

    def _nearest(self, session: SimulatedSession, roomiest: SimulatedEngine) -> SimulatedEngine:
        """The engine that probably holds the session's KV cache, if that outweighs its longer queue."""
        near = session.near
        if near is None or near.is_gone or near.version != session.near_version:
            return roomiest
        has_room = len(near.running) < near.max_running
        num_cached = session.num_tokens - session.turns[session.number].num_new
        return near if has_room and near.outstanding - num_cached < roomiest.outstanding else roomiest

    def _roomiest(self) -> SimulatedEngine | None:
        while self._roomy:
            outstanding, num_running, _, engine = self._roomy[0]
            fits = (outstanding, num_running) == (engine.outstanding, len(engine.running))
            if fits and not engine.is_gone and num_running < engine.max_running:
                return engine
            heappop(self._roomy)
        return None

    def _take(self, engine: SimulatedEngine, session: SimulatedSession) -> None:
        name = str(id(session))
        num_wanted = session.num_wanted - session.num_sampled
        num_cached = engine.kept.take(name)
        slot = engine.batch.join(name, session.num_tokens, num_wanted, num_cached=num_cached)
        engine.running[name] = (session, slot)
        engine.outstanding += slot.num_prompt - slot.num_cached + self._typical
        if not self._looks:
            self._looks = True
            self._clock.after(SWEEP_S, self._look)
        if session.min_version is None:
            session.min_version = engine.version
            self.on_started(session, engine.version)
        self._note_room(engine)

    def _advance(self, engine: SimulatedEngine) -> None:
        """Advance the engine to now; sessions whose turn is complete leave it."""
        start = engine.ticked_at
        engine.ticked_at = self._clock.now
        for slot in engine.batch.advance(self._clock.now - start):
            session, _ = engine.running.pop(slot.name)
            engine.outstanding -= slot.num_prompt - slot.num_cached + self._typical
            engine.num_passed += session.num_wanted - session.num_sampled
            session.num_sampled = session.num_wanted
            session.number += 1
            session.near = engine
            session.near_version = engine.version
            if not session.is_over:
                engine.kept.keep(slot.name, session.num_tokens, engine.batch.context)
            self._clock.after(0.0, self.on_answered, session)
            self._note_room(engine)

    def _wake(self, engine: SimulatedEngine, wake: int) -> None:
        if engine.is_gone or wake != engine.num_wakes:
            return
        self._advance(engine)
        self._note_busy(engine)
        self._wake_later(engine)
        self._schedule()

    def _wake_later(self, engine: SimulatedEngine) -> None:
        engine.num_wakes += 1
        if (due := engine.batch.next_due_s()) is not None:
            self._clock.after(due + 1e-6, self._wake, engine, engine.num_wakes)

    def _note_room(self, engine: SimulatedEngine) -> None:
        if len(engine.running) < engine.max_running:
            entry = (engine.outstanding, len(engine.running), next(self._order), engine)
            heappush(self._roomy, entry)

    def _note_busy(self, engine: SimulatedEngine) -> None:
        if engine.running and engine.busy_since is None:
            engine.busy_since = self._clock.now
        elif not engine.running:
            self._end_busy(engine)

    def _end_busy(self, engine: SimulatedEngine) -> None:
        if engine.busy_since is not None and engine.busy_since < self._clock.now:
            self.spans.append(Span(engine.worker, "rollout", engine.busy_since, self._clock.now, "busy"))
        engine.busy_since = None
