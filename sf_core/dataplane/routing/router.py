"""Dispatch of a run's generations to its engines.

Owns the engines of one run, the waiting generations, and the order of the steps in which an engine is paused,
drained or revoked. Knows nothing of sessions or text; sends frames to its engines. choice.py chooses engines.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from sf_core.dataplane.api_schemas import PauseMode
from sf_core.dataplane.conditions import Condition
from sf_core.dataplane.errors import RETRY_AFTER_S, ApiError, EngineFailed
from sf_core.dataplane.routing.choice import MeanAnswerLength, choose, num_cached
from sf_core.dataplane.routing.connection import (
    EngineConnection,
    EngineFaultError,
    ends_without_a_token,
    find_obstacle,
    has_loaded_or_refused,
    has_stopped_or_need_not,
)
from sf_core.dataplane.routing.generation import Generation, submitted_by_request
from sf_core.dataplane.routing.rebalancing import plan_moves
from sf_core.dataplane.routing.wait_queue import (
    MAX_FAULTS,
    QueueLimits,
    WaitQueue,
    assign_trials,
    mark_suspects,
)
from sf_core.engines import wire
from sf_core.types import Chunk, WeightsRef

log = logging.getLogger(__name__)


class Router:
    def __init__(self, weights: WeightsRef, limits: QueueLimits, num_ids: int = 2**31) -> None:
        """Valid token ids of engines are below `num_ids`."""
        self.weights = weights
        self.limits = limits
        self._num_ids = num_ids
        self.engines: list[EngineConnection] = []
        self.waiting = WaitQueue()
        self.paused: set[str | None] = set()
        """Ids of paused engines; None stands for the whole run. An engine that reconnects is still paused."""
        self.interruptions = 0
        self.moves = 0
        """Number of requests taken from engines with long queues; each is an interruption too."""
        self.bytes_to_engines = 0
        self.bytes_from_engines = 0
        self.closed: ApiError | None = None
        """The refusal of every request, once the run has ended and no engine will connect."""
        self._mean_length = MeanAnswerLength()
        self._changed = Condition()
        self._is_dispatch_scheduled = False

    def check_room(self) -> None:
        """Raises ApiError 429 if the wait queue is full."""
        if len(self.waiting) >= self.limits.max_waiting:
            raise ApiError(
                429,
                f"{len(self.waiting)} requests are already waiting, because {self.waiting_reason()}; "
                "try again later.",
                code="too_many_waiting",
                retry_after_s=RETRY_AFTER_S,
            )

    def submit(self, generation: Generation) -> None:
        generation.submitted_at = time.monotonic()
        if (collected := submitted_by_request.get()) is not None:
            collected.append(generation)
        if self.closed is not None:
            return generation.refuse(self.closed)
        self.waiting.push(generation)
        self._schedule()

    def close(self, refusal: ApiError) -> None:
        """Refuse all requests, also later ones."""
        self.closed = refusal
        in_flight = [generation for engine in self.engines for generation in engine.in_flight.values()]
        for generation in [*self.waiting, *in_flight]:
            self.stop(generation)
            generation.refuse(refusal)

    def cancel(self, generation: Generation, reason: str) -> None:
        """End a generation whose answer is no longer wanted. Later chunks of its engine are ignored."""
        if generation.is_over:
            return
        self.stop(generation)
        generation.cancel(reason)

    def stop(self, generation: Generation) -> None:
        """Stop sampling for this generation."""
        for engine in self.engines:
            if engine.remove_request(generation.request_id) is not None:
                engine.send(wire.pack(wire.Abort([generation.request_id])))
                self._after_removal(engine)
                return
        self.waiting.remove(generation)

    def receive(self, engine: EngineConnection, chunks: list[Chunk]) -> int:
        """Append an engine's chunks to its generations; returns the number of tokens. At the first invalid
        chunk, which is not appended, drops the engine and raises EngineFaultError."""
        engine.last_heard_at = time.monotonic()
        interrupted: list[Generation] = []
        num_tokens = 0
        fault: str | None = None
        for chunk in chunks:
            generation = engine.in_flight.get(chunk.request_id)
            if generation is None:
                continue
            if (fault := generation.validate(chunk, engine.wanted_version, self._num_ids)) is not None:
                self._blame(engine, generation, fault)
                break
            num_tokens += len(chunk.token_ids)
            if chunk.token_ids:
                engine.record_first_token(generation)
            if chunk.finish_reason is None:
                engine.record_progress(generation, len(chunk.token_ids))
            else:
                engine.remove_request(chunk.request_id)
            if chunk.fault or ends_without_a_token(chunk, generation):
                failure = f"failed ({chunk.fault})" if chunk.fault else "ended the request without a token"
                generation.refuse(EngineFailed(f"engine {engine.engine_id} {failure}"))
            elif generation.append(chunk, engine.engine_id):
                interrupted.append(generation)
            elif generation.finish_reason is not None:
                self._mean_length.update(len(generation.token_ids))
            elif generation.num_decode == 0:
                engine.extend_estimate(generation, self._mean_length.expected_remaining(generation))
        engine.num_tokens += num_tokens
        self._requeue(interrupted)
        if fault is not None:
            self.disconnect(engine, None)
            raise EngineFaultError(f"the engine {fault}")
        self._after_removal(engine)
        return num_tokens

    def enforce_limits(self) -> None:
        """Refuse requests that waited too long, drop silent engines, rebalance; called once a second."""
        now = time.monotonic()
        limits = self.limits
        for generation in list(self.waiting):
            if now - generation.waiting_since > limits.patience_s:
                self._refuse(generation, self._explain_wait(generation))
        for engine in self.engines:
            if engine.has_stopped and now - engine.last_heard_at > limits.patience_s:
                for generation in list(engine.in_flight.values()):
                    self._refuse(generation, "the engine of this request is paused")
        for engine in [e for e in self.engines if e.silent_for(now) > limits.engine_silence_s]:
            log.warning(
                "engine %s has requests but sends nothing, so the data plane drops it", engine.engine_id
            )
            self.disconnect(engine, f"sent nothing for {limits.engine_silence_s:g} s")
        self._rebalance()

    def _rebalance(self) -> None:
        """Abort running requests of engines with long queues (rebalancing.py). They are dispatched again when
        their engines have returned them. This has no effect while requests wait, which fill free engines
        anyway, nor while engines load weights or return aborted requests, because queue lengths mislead
        then."""
        engines = [engine for engine in self.engines if engine.is_routable]
        versions = {version for engine in engines for version in (engine.version, engine.wanted_version)}
        is_any_moving = any(engine.moving for engine in engines)
        if self.waiting or is_any_moving or len(versions) != 1:
            return
        # queues are compared by identity, so each is the key of its engine
        engine_by_queue = {engine.queue(): engine for engine in engines}
        for generation, source, _ in plan_moves(list(engine_by_queue)):
            generation.num_moved_at = generation.num_tokens
            engine_by_queue[source].moving.add(generation.request_id)
            self.moves += 1
        for engine in engines:
            if engine.moving:
                engine.send(wire.pack(wire.Abort(sorted(engine.moving))))

    def _blame(self, engine: EngineConnection, generation: Generation, fault: str) -> None:
        generation.num_faults += 1
        self._refuse_poison(engine, generation, fault)

    def _refuse_poison(self, engine: EngineConnection, generation: Generation, fault: str) -> None:
        """Refuse a request that has ended too many engines: it must not end all of them."""
        if generation.num_faults >= MAX_FAULTS:
            engine.remove_request(generation.request_id)
            reason = f"engine {engine.engine_id} {fault}, as an engine did before"
            generation.refuse(EngineFailed(reason, is_poison=True))

    def _explain_wait(self, generation: Generation) -> str:
        waiting_reason = self.waiting_reason(generation.floor)
        if generation.suspicion is None:
            return waiting_reason
        return f"it may have ended an engine and must be tried alone, but {waiting_reason}"

    def _refuse(self, generation: Generation, reason: str) -> None:
        self.stop(generation)
        message = f"No engine sampled for this request for {self.limits.patience_s:g} s: {reason}."
        generation.refuse(ApiError(503, message, code="no_engine", retry_after_s=RETRY_AFTER_S))

    def waiting_reason(self, floor: int = 0) -> str:
        """Why a request that needs this policy version or a later one waits."""
        return find_obstacle(self.engines, floor, is_run_paused=None in self.paused)

    @property
    def is_serving(self) -> bool:
        return any(engine.version is not None and not engine.paused for engine in self.engines)

    def add(self, engine: EngineConnection) -> None:
        """Connect an engine, and tell it the weights to load and whether it is paused."""
        engine.wanted_version = engine.first_version = self.weights.version
        engine.paused = self._is_paused(engine)
        engine.send(wire.pack(wire.Welcome(self.weights, engine.paused)))
        self.engines.append(engine)
        self._changed.notify()

    def confirm(self, engine: EngineConnection, version: int) -> None:
        """Record that the engine has loaded this version. A new engine that was told of a newer version while
        it loaded gets no requests before it has loaded the newer one. Raises EngineFaultError if the version
        is newer than the engine was told to load, or older than its current version."""
        current = engine.version or 0
        if not current <= version <= engine.wanted_version:
            raise EngineFaultError(
                f"the engine loaded version {version}; expected {current} to {engine.wanted_version}"
            )
        engine.last_heard_at = time.monotonic()
        engine.has_loaded = True
        is_new = engine.version is None
        if is_new and version < engine.wanted_version:
            return
        engine.serving_since = engine.serving_since or engine.last_heard_at
        engine.count_time()
        engine.version = version
        self._schedule()
        self._changed.notify()

    def refuse(self, engine: EngineConnection, version: int, reason: str) -> None:
        """Record that the engine cannot load this version and continues with its current one."""
        log.warning("engine %s refuses version %d: %s", engine.engine_id, version, reason)
        engine.last_heard_at = time.monotonic()
        engine.refused_version = version
        engine.refusal = reason
        self._changed.notify()

    def confirm_pause(self, engine: EngineConnection) -> None:
        """Record that the engine samples nothing until it is resumed."""
        engine.last_heard_at = time.monotonic()
        engine.num_unconfirmed_pauses -= 1
        self._changed.notify()

    def disconnect(self, engine: EngineConnection, failure: str | None = "ended") -> None:
        """Disconnect an engine. Its requests continue on other engines from the last received token.
        `failure` is a predicate about the end of an engine that was not drained; None: no request can be the
        cause."""
        if engine in self.engines:
            self.engines.remove(engine)
        without_token = list(engine.without_token.values())
        if without_token and failure is not None and engine.drain_reason is None:
            mark_suspects(without_token, engine.worker)
            self._refuse_poison(engine, without_token[0], f"{failure} while it worked on this request")
        lost = [engine.remove_request(request_id) for request_id in list(engine.in_flight)]
        self._requeue([g for g in lost if g is not None and g.interrupt(engine.engine_id)])
        engine.disconnected.set()
        self._changed.notify()

    def drain(self, engine: EngineConnection, reason: str) -> None:
        """Give the engine no new requests; it yields when it has finished those in flight."""
        engine.count_time()
        engine.drain_reason = reason
        self._after_removal(engine)

    async def revoke(self, engine: EngineConnection, reason: str) -> None:
        """Stop routing to the engine, abort its requests, and wait until it has sent their tokens and
        yielded."""
        engine.send_expecting_answer(wire.pack(wire.Abort()))
        self.drain(engine, reason)
        await engine.disconnected.wait()

    async def update(self, weights: WeightsRef) -> dict[str, int]:
        """Have every engine load these weights. Returns the version of each engine that is still connected,
        once all engines that had any weights have loaded or refused these. This also waits for new engines
        whose first weights are too old: if iterations are shorter than loading, they would never catch up
        otherwise. It does not wait for engines that are still starting: they load these weights before they
        get requests (`confirm`)."""
        self.weights = weights
        for engine in self.engines:
            engine.send_expecting_answer(wire.pack(wire.Update(weights)))
            engine.wanted_version = weights.version
        started = [engine for engine in self.engines if engine.has_loaded]
        await self._wait_for_each(started, has_loaded_or_refused)
        return {
            engine.engine_id: engine.version
            for engine in started
            if engine.version is not None and not engine.disconnected.is_set()
        }

    async def pause(self, mode: PauseMode, engine_id: str | None = None) -> int:
        """Stop sampling of the run or of one engine. Returns the number of stopped engines, once all have
        stopped.

        Freeze: engines keep their requests and KV cache. Evacuate: they return their requests, which continue
        on engines that are not paused, or wait."""
        engines = [engine for engine in self.engines if engine_id in (None, engine.engine_id)]
        self.paused.add(engine_id)
        if mode == "evacuate":
            for engine in engines:
                engine.send_expecting_answer(wire.pack(wire.Abort()))
        self._send_pauses()
        await self._wait_for_each(engines, has_stopped_or_need_not)
        return sum(engine.has_stopped for engine in engines)

    def resume(self, engine_id: str | None = None) -> None:
        """Undo the same pause. An engine samples again once neither it nor the run is paused."""
        self.paused.discard(engine_id)
        self._send_pauses()

    def find(self, engine_id: str) -> EngineConnection:
        """The connected engine of this id. Raises ApiError 404."""
        for engine in self.engines:
            if engine.engine_id == engine_id:
                return engine
        raise ApiError(404, f"No engine {engine_id} is connected.", code="engine_not_found")

    def _is_paused(self, engine: EngineConnection) -> bool:
        return None in self.paused or engine.engine_id in self.paused

    def _send_pauses(self) -> None:
        for engine in self.engines:
            if engine.paused != self._is_paused(engine):
                engine.send_expecting_answer(wire.pack(wire.Pause(not engine.paused)))
                engine.count_time()
                engine.paused = not engine.paused
                engine.num_unconfirmed_pauses += engine.paused
        self._changed.notify()
        self._schedule()

    async def _wait_for_each(
        self, engines: list[EngineConnection], condition: Callable[[EngineConnection], bool]
    ) -> None:
        await self._changed.until(
            lambda: all(engine.disconnected.is_set() or condition(engine) for engine in engines)
        )

    def _after_removal(self, engine: EngineConnection) -> None:
        """Dispatch after a request has left the engine. Have a drained engine yield after its last
        request."""
        if engine.drain_reason is not None and not engine.in_flight and not engine.yield_requested:
            engine.send_expecting_answer(wire.pack(wire.Yield(engine.drain_reason)))
            engine.yield_requested = True
        self._schedule()

    def _requeue(self, interrupted: list[Generation]) -> None:
        self.interruptions += len(interrupted)
        for generation in interrupted:
            self.waiting.push(generation)
        self._schedule()

    def _schedule(self) -> None:
        """Dispatch once per turn of the event loop: requests that arrive together share a frame."""
        if not self._is_dispatch_scheduled:
            self._is_dispatch_scheduled = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._is_dispatch_scheduled = False
        if None in self.paused or not self.waiting:
            return
        trials = assign_trials(self.waiting.suspects, self.engines)
        assigned: dict[EngineConnection, list[Generation]] = {}
        open_engines = [engine for engine in self.engines if engine.has_room]
        passed_over: list[Generation] = []
        num_seen = 0
        for generation in self.waiting:
            if not open_engines:
                break
            num_seen += 1
            candidates = [
                engine for engine in open_engines if engine.can_take(generation, trials.get(engine))
            ]
            if not candidates:
                passed_over.append(generation)
                continue
            engine = choose(candidates, generation)
            num_prefill = generation.num_tokens - num_cached(engine, generation)
            engine.add_request(generation, num_prefill, self._mean_length.expected_remaining(generation))
            assigned.setdefault(engine, []).append(generation)
            if not engine.has_room:
                open_engines.remove(engine)
        self.waiting.retain_passed_over(passed_over, num_seen)
        for engine, generations in assigned.items():
            assert engine.version is not None
            requests = [generation.remaining_request(engine.version) for generation in generations]
            engine.send(wire.pack(wire.Submit.of(requests)))
