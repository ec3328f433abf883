"""Which engine works on which generation.

Owns the engines of one run, the waiting generations in arrival order, and the order in which an engine is
taken away. Knows nothing of sessions or text; sends frames through a function it is given.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from sf_core.dataplane import wire
from sf_core.dataplane.generation import Generation
from sf_core.dataplane.signals import Signal
from sf_core.types import Chunk, FinishReason, WeightsRef


@dataclass(eq=False)
class EngineLink:
    """One connected engine."""

    engine_id: str
    lease_id: str
    worker: str
    attempt: int
    max_running: int
    send: Callable[[bytes], None]
    version: int | None = None
    """Policy version it has confirmed; None while it is being made."""
    routable: bool = True
    in_flight: dict[str, Generation] = field(default_factory=dict)
    num_tokens: int = 0
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """It has yielded, or its connection is closed."""

    def can_take(self, generation: Generation) -> bool:
        return self.has_room and self.version is not None and self.version >= generation.floor

    @property
    def has_room(self) -> bool:
        return self.routable and self.version is not None and len(self.in_flight) < self.max_running


class Router:
    def __init__(self, weights: WeightsRef) -> None:
        self.weights = weights
        self.links: list[EngineLink] = []
        self.waiting: deque[Generation] = deque()
        self.paused = False
        self.interruptions = 0
        self._changed = Signal()
        self._scheduled = False

    def submit(self, generation: Generation) -> None:
        self.waiting.append(generation)
        self._schedule()

    def cancel(self, generation: Generation, reason: str) -> None:
        """Nobody waits for it any more. What its engine still reports of it is ignored."""
        if generation.is_over:
            return
        generation.cancelled = reason
        self.stop(generation)
        generation.wake()

    def stop(self, generation: Generation) -> None:
        """Sample no more for it."""
        for link in self.links:
            if link.in_flight.pop(generation.request_id, None) is not None:
                link.send(wire.pack("abort", [generation.request_id]))
                self._schedule()
                return
        if generation in self.waiting:
            self.waiting.remove(generation)

    def add(self, link: EngineLink) -> None:
        self.links.append(link)
        self._changed.notify()

    def confirm(self, link: EngineLink, version: int) -> None:
        """The engine now samples with this version."""
        link.version = version
        self._schedule()
        self._changed.notify()

    def receive(self, link: EngineLink, chunks: list[Chunk]) -> int:
        """Take what an engine sampled; returns how many tokens were wanted."""
        interrupted: list[Generation] = []
        num_tokens = 0
        for chunk in chunks:
            generation = link.in_flight.get(chunk.request_id)
            if generation is None:
                continue
            num_tokens += len(chunk.token_ids)
            if chunk.finish_reason is not None:
                del link.in_flight[chunk.request_id]
            if generation.absorb(chunk, link.engine_id):
                interrupted.append(generation)
        link.num_tokens += num_tokens
        self._continue_elsewhere(interrupted)
        if not link.in_flight:
            self._changed.notify()
        self._schedule()
        return num_tokens

    def lose(self, link: EngineLink) -> None:
        """The connection is gone: everything on it continues elsewhere from the last received token."""
        if link in self.links:
            self.links.remove(link)
        lost, link.in_flight = list(link.in_flight.values()), {}
        self._continue_elsewhere(
            [g for g in lost if g.absorb(Chunk(g.request_id, [], [], 0, FinishReason.ABORT), link.engine_id)]
        )
        link.gone.set()
        self._changed.notify()
        self._schedule()

    async def take_away(self, link: EngineLink, reason: str) -> None:
        """Stop routing, abort, wait for the partial tokens, then have the engine yield (design 5.2)."""
        link.routable = False
        link.send(wire.pack("abort", None))
        await self._changed.until(lambda: not link.in_flight or link.gone.is_set())
        link.send(wire.pack("yield", reason))
        await link.gone.wait()

    async def update(self, weights: WeightsRef) -> dict[str, int]:
        """Have every engine hold these weights; returns the version of each that lives."""
        self.weights = weights
        for link in self.links:
            link.send(wire.pack("update", {"version": weights.version, "uri": weights.uri}))
        told = list(self.links)
        await self._changed.until(
            lambda: all(
                link.gone.is_set() or (link.version is not None and link.version >= weights.version)
                for link in told
            )
        )
        return {link.engine_id: weights.version for link in told if not link.gone.is_set()}

    def set_paused(self, paused: bool) -> None:
        """Freeze or thaw: engines keep their requests, new ones wait here."""
        self.paused = paused
        for link in self.links:
            link.send(wire.pack("pause" if paused else "resume"))
        self._schedule()

    def _continue_elsewhere(self, interrupted: list[Generation]) -> None:
        self.interruptions += len(interrupted)
        # they arrived before anything that waits
        self.waiting.extendleft(reversed(interrupted))

    def _schedule(self) -> None:
        """Dispatch once per turn of the event loop: what arrives together is sent in one frame."""
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._scheduled = False
        if self.paused:
            return
        given: dict[EngineLink, list[Generation]] = {}
        passed_over: list[Generation] = []
        while self.waiting and any(link.has_room for link in self.links):
            generation = self.waiting.popleft()
            takers = [link for link in self.links if link.can_take(generation)]
            if not takers:
                passed_over.append(generation)
                continue
            link = min(takers, key=lambda candidate: len(candidate.in_flight))
            link.in_flight[generation.request_id] = generation
            given.setdefault(link, []).append(generation)
        self.waiting.extendleft(reversed(passed_over))
        for link, generations in given.items():
            assert link.version is not None
            link.send(wire.pack_requests([g.remaining_request(link.version) for g in generations]))
