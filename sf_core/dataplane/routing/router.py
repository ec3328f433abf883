"""Dispatch of a run's generations to its engines.

Owns the engines of one run, the waiting generations, and the order in which an engine is paused, drained or
taken away. Knows nothing of sessions or text; sends frames through its links. choice.py chooses engines.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from sf_core.dataplane.bodies import PauseMode
from sf_core.dataplane.errors import RETRY_AFTER_S, ApiError
from sf_core.dataplane.routing.choice import TypicalLength, choose, num_cached
from sf_core.dataplane.routing.connection import EngineConnection
from sf_core.dataplane.routing.generation import Generation, asked_by_request
from sf_core.dataplane.routing.rebalancing import find_moves
from sf_core.dataplane.routing.wait_queue import Limits, WaitQueue
from sf_core.dataplane.signals import Signal
from sf_core.engines import wire
from sf_core.types import Chunk, FinishReason, WeightsRef

log = logging.getLogger(__name__)


MAX_FAULTS = 2
"""Engines that one request may cost: a request that none answers validly must not end them all."""


class EngineFaultError(ValueError):
    """An engine sent something invalid; the message is a predicate whose subject is the engine."""


class Router:
    def __init__(self, weights: WeightsRef, limits: Limits, num_ids: int = 2**31) -> None:
        """Valid token ids of engines are below `num_ids`."""
        self.weights = weights
        self.limits = limits
        self._num_ids = num_ids
        self.links: list[EngineConnection] = []
        self.waiting = WaitQueue()
        self.paused = False
        self.paused_engines: set[str] = set()
        """Ids of engines that were paused individually; one that reconnects is still paused."""
        self.interruptions = 0
        self.moves = 0
        """Number of requests taken from engines with long queues; each is an interruption too."""
        self.bytes_to_engines = self.bytes_from_engines = 0
        self.closed: ApiError | None = None
        """Why every request is refused: the run has ended, and no engine comes."""
        self._typical = TypicalLength()
        self._changed = Signal()
        self._scheduled = False

    # --- generations

    def check_room(self) -> None:
        """Raises ApiError 429 if the wait queue is full."""
        if len(self.waiting) >= self.limits.max_waiting:
            raise ApiError(
                429,
                f"{len(self.waiting)} requests wait already, because {self.obstacle()}; try again later.",
                code="too_many_waiting",
                retry_after_s=RETRY_AFTER_S,
            )

    def submit(self, generation: Generation) -> None:
        generation.submitted_at = time.monotonic()
        if (asked := asked_by_request.get()) is not None:
            asked.append(generation)
        if self.closed is not None:
            return generation.refuse(self.closed)
        self.waiting.join(generation)
        self._schedule()

    def close(self, refusal: ApiError) -> None:
        """Refuse all requests, those that are asked later included."""
        self.closed = refusal
        for generation in [*self.waiting, *(g for link in self.links for g in link.in_flight.values())]:
            self.stop(generation)
            generation.refuse(refusal)

    def cancel(self, generation: Generation, reason: str) -> None:
        """End a generation whose answer is no longer wanted; whatever its engine still sends is ignored."""
        if generation.is_over:
            return
        self.stop(generation)
        generation.cancel(reason)

    def stop(self, generation: Generation) -> None:
        """Sample no more for this generation."""
        for link in self.links:
            if link.drop(generation.request_id) is not None:
                link.send(wire.pack(wire.Abort([generation.request_id])))
                self._settle(link)
                return
        self.waiting.leave(generation)

    def receive(self, link: EngineConnection, chunks: list[Chunk]) -> int:
        """Take an engine's chunks; returns the number of tokens of generations in flight there. At the first
        invalid chunk, of which nothing is taken, drops the engine and raises EngineFaultError."""
        link.heard_at = time.monotonic()
        interrupted: list[Generation] = []
        num_tokens = 0
        fault: str | None = None
        for chunk in chunks:
            generation = link.in_flight.get(chunk.request_id)
            if generation is None:
                continue
            if (fault := generation.fault_of(chunk, link.wanted_version, self._num_ids)) is not None:
                self._note_fault(link, generation, fault)
                break
            num_tokens += len(chunk.token_ids)
            if chunk.finish_reason is None:
                link.progressed(generation, len(chunk.token_ids))
            else:
                link.drop(chunk.request_id)
            if _ends_without_a_token(chunk, generation):
                generation.refuse(_failed(f"engine {link.engine_id} ended it without a token"))
            elif generation.absorb(chunk, link.engine_id):
                interrupted.append(generation)
            elif generation.finish_reason is not None:
                self._typical.learn(len(generation.token_ids))
            elif generation.num_decode == 0:
                link.expect_more(generation, self._typical.remaining(generation))
        link.num_tokens += num_tokens
        self._wait_again(interrupted)
        if fault is not None:
            self.lose(link)
            raise EngineFaultError(fault)
        self._settle(link)
        return num_tokens

    def sweep(self) -> None:
        """Refuse requests that waited too long, drop silent engines, rebalance; called once a second."""
        now = time.monotonic()
        for generation in self.waiting.waiting_since_before(now - self.limits.patience_s):
            self._refuse(generation, self.obstacle(generation.floor))
        for link in self.links:
            if link.is_still and now - link.heard_at > self.limits.patience_s:
                for generation in list(link.in_flight.values()):
                    self._refuse(generation, "its engine is paused")
        for link in [e for e in self.links if e.silent_for(now) > self.limits.engine_silence_s]:
            log.warning("engine %s has work and says nothing: it is dropped", link.engine_id)
            self.lose(link)
        self._rebalance()

    def _rebalance(self) -> None:
        """Abort running requests of engines with long queues (rebalancing.py); they are dispatched again when
        their engines have returned them. Not done while requests wait, which fill free engines anyway, nor
        while engines load weights or return aborted requests, because queue lengths mislead then."""
        links = [link for link in self.links if link.is_routable]
        versions = {version for link in links for version in (link.version, link.wanted_version)}
        if self.waiting or any(link.moving for link in links) or len(versions) != 1:
            return
        owners = {link.queue(): link for link in links}
        for generation, source, _ in find_moves(list(owners)):
            generation.num_moved_at = generation.num_tokens
            owners[source].moving.add(generation.request_id)
            self.moves += 1
        for link in links:
            if link.moving:
                link.send(wire.pack(wire.Abort(sorted(link.moving))))

    def _note_fault(self, link: EngineConnection, generation: Generation, fault: str) -> None:
        generation.num_faults += 1
        if generation.num_faults == MAX_FAULTS:
            link.drop(generation.request_id)
            generation.refuse(_failed(f"engine {link.engine_id} {fault}, as others did before"))

    def _refuse(self, generation: Generation, reason: str) -> None:
        self.stop(generation)
        message = f"No engine sampled for this request for {self.limits.patience_s:g} s: {reason}."
        generation.refuse(ApiError(503, message, code="no_engine", retry_after_s=RETRY_AFTER_S))

    def obstacle(self, floor: int = 0) -> str:
        """Why a request that needs this policy version or a later one waits."""
        present = [link for link in self.links if link.version is not None and link.leaving is None]
        if self.paused:
            return "the run is paused"
        if not present:
            is_loading = any(link.version is None for link in self.links)
            return "no engine is loaded yet" if is_loading else "no engine is connected"
        if all(link.paused for link in present):
            return "every engine is paused"
        if all(link.version is not None and link.version < floor for link in present):
            return f"no engine holds policy version {floor} or a later one"
        return "every engine is full"

    # --- engines

    @property
    def is_serving(self) -> bool:
        return any(link.version is not None and not link.paused for link in self.links)

    def add(self, link: EngineConnection) -> None:
        """Connect an engine and tell it which weights to load and whether it is paused."""
        link.wanted_version = link.first_version = self.weights.version
        link.paused = self._is_paused(link)
        link.send(wire.pack(wire.Welcome(self.weights, link.paused)))
        self.links.append(link)
        self._changed.notify()

    def confirm(self, link: EngineConnection, version: int) -> None:
        """Note that the engine has loaded this version. A newcomer that was told of a newer version while it
        loaded gets no requests before it has that. Raises EngineFaultError if the version is newer than the
        engine was told to load, or older than the one it had."""
        held = link.version or 0
        if not held <= version <= link.wanted_version:
            raise EngineFaultError(f"took version {version}; expected {held} to {link.wanted_version}")
        link.heard_at = time.monotonic()
        link.is_made = True
        if link.version is None and version < link.wanted_version:
            return
        link.serving_since = link.serving_since or link.heard_at
        link.version = version
        self._schedule()
        self._changed.notify()

    def refuse(self, link: EngineConnection, version: int, reason: str) -> None:
        """Note that the engine cannot take this version and serves on with the one it has."""
        log.warning("engine %s refuses version %d: %s", link.engine_id, version, reason)
        link.heard_at = time.monotonic()
        link.refused_version, link.refusal = version, reason
        self._changed.notify()

    def confirm_pause(self, link: EngineConnection) -> None:
        """Note that the engine samples nothing until it is resumed."""
        link.heard_at = time.monotonic()
        link.num_pauses_open -= 1
        self._changed.notify()

    def lose(self, link: EngineConnection) -> None:
        """Disconnect an engine; its requests continue elsewhere from the last received token."""
        if link in self.links:
            self.links.remove(link)
        lost = [link.drop(request_id) for request_id in list(link.in_flight)]
        self._wait_again([g for g in lost if g is not None and g.absorb(_nothing_more(g), link.engine_id)])
        link.gone.set()
        self._changed.notify()

    def drain(self, link: EngineConnection, reason: str) -> None:
        """Give the engine no new requests; it yields when it has finished those in flight."""
        link.leaving = reason
        self._settle(link)

    async def take_away(self, link: EngineConnection, reason: str) -> None:
        """Stop routing, abort, wait for the partial tokens, then have the engine yield."""
        link.tell(wire.pack(wire.Abort()))
        self.drain(link, reason)
        await link.gone.wait()

    async def update(self, weights: WeightsRef) -> dict[str, int]:
        """Have every engine take these weights. Returns the version of each engine that is still connected,
        once all that had any weights hold these or have refused them: a newcomer whose first weights are too
        old would otherwise never catch up if iterations are shorter than loading. An engine that is still
        starting is not waited for; it takes these weights before it gets requests (`confirm`)."""
        self.weights = weights
        for link in self.links:
            link.tell(wire.pack(wire.Update(weights)))
            link.wanted_version = weights.version
        made = [link for link in self.links if link.is_made]
        await self._until_each(made, _holds_what_it_was_told)
        return {
            link.engine_id: link.version
            for link in made
            if link.version is not None and not link.gone.is_set()
        }

    async def pause(self, mode: PauseMode, engine_id: str | None = None) -> int:
        """Stop sampling of the run or of one engine; returns the number of stopped engines once all have.

        Freeze: engines keep their requests and KV cache. Evacuate: they return their requests, which continue
        on engines that are not paused, or wait."""
        links = [link for link in self.links if engine_id in (None, link.engine_id)]
        self.note_paused(engine_id)
        if mode == "evacuate":
            for link in links:
                link.tell(wire.pack(wire.Abort()))
        self._tell_pauses()
        await self._until_each(links, _stands_still_or_need_not)
        return sum(link.is_still for link in links)

    def resume(self, engine_id: str | None = None) -> None:
        """Undo the same pause. An engine samples again once neither it nor the run is paused."""
        if engine_id is None:
            self.paused = False
        else:
            self.paused_engines.discard(engine_id)
        self._tell_pauses()

    def note_paused(self, engine_id: str | None) -> None:
        """Mark the run or one engine as paused, which also holds for engines that connect later."""
        if engine_id is None:
            self.paused = True
        else:
            self.paused_engines.add(engine_id)

    def find(self, engine_id: str) -> EngineConnection:
        """The connected engine of this id. Raises ApiError 404."""
        for link in self.links:
            if link.engine_id == engine_id:
                return link
        raise ApiError(404, f"No engine {engine_id} is connected.", code="engine_not_found")

    def _is_paused(self, link: EngineConnection) -> bool:
        return self.paused or link.engine_id in self.paused_engines

    def _tell_pauses(self) -> None:
        for link in self.links:
            if link.paused != self._is_paused(link):
                link.tell(wire.pack(wire.Pause(not link.paused)))
                link.paused = not link.paused
                link.num_pauses_open += link.paused
        self._changed.notify()
        self._schedule()

    async def _until_each(
        self, links: list[EngineConnection], condition: Callable[[EngineConnection], bool]
    ) -> None:
        await self._changed.until(lambda: all(link.gone.is_set() or condition(link) for link in links))

    def _settle(self, link: EngineConnection) -> None:
        """Dispatch after a request has left the engine, and have it yield if it leaves and has none."""
        if link.leaving is not None and not link.in_flight and not link.told_to_yield:
            link.tell(wire.pack(wire.Yield(link.leaving)))
            link.told_to_yield = True
        self._schedule()

    # --- dispatch

    def _wait_again(self, interrupted: list[Generation]) -> None:
        self.interruptions += len(interrupted)
        for generation in interrupted:
            self.waiting.join(generation)
        self._schedule()

    def _schedule(self) -> None:
        """Dispatch once per turn of the event loop: requests that arrive together share a frame."""
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._scheduled = False
        if self.paused or not self.waiting:
            return
        given: dict[EngineConnection, list[Generation]] = {}
        open_links = [link for link in self.links if link.has_room]
        passed_over: list[Generation] = []
        num_seen = 0
        for generation in self.waiting:
            if not open_links:
                break
            num_seen += 1
            takers = [link for link in open_links if link.can_take(generation)]
            if not takers:
                passed_over.append(generation)
                continue
            link = choose(takers, generation)
            num_prefill = generation.num_tokens - num_cached(link, generation)
            link.take(generation, num_prefill, self._typical.remaining(generation))
            given.setdefault(link, []).append(generation)
            if not link.has_room:
                open_links.remove(link)
        self.waiting.keep(passed_over, num_seen)
        for link, generations in given.items():
            assert link.version is not None
            requests = [generation.remaining_request(link.version) for generation in generations]
            link.send(wire.pack(wire.Submit.of(requests)))


def _ends_without_a_token(chunk: Chunk, generation: Generation) -> bool:
    is_end = chunk.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    return is_end and not chunk.token_ids and not generation.token_ids


def _failed(reason: str) -> ApiError:
    return ApiError(502, f"This request got no answer that counts: {reason}.", code="engine_failed")


def _nothing_more(generation: Generation) -> Chunk:
    return Chunk(generation.request_id, [], [], 0, FinishReason.ABORT)


def _holds_what_it_was_told(link: EngineConnection) -> bool:
    return link.version is not None and max(link.version, link.refused_version) >= link.wanted_version


def _stands_still_or_need_not(link: EngineConnection) -> bool:
    # an engine that is still starting reads the pause once it runs; until then it samples nothing
    return link.is_still or not link.paused or link.version is None
