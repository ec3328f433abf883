"""One connected engine as the router sees it: what it was told, what it confirmed, what it works on.

Owns the state of a link and the sums over what is in flight there. Decides nothing (router.py, routing.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from sf_core.dataplane.routing.generation import Generation
from sf_core.dataplane.routing.rebalancing import Queue, Running

LinkState = Literal["loading", "leaving", "paused", "serving"]


@dataclass(eq=False)
class EngineLink:
    engine_id: str
    lease_id: str
    worker: str
    attempt: int
    max_running: int
    send: Callable[[bytes], None]
    version: int | None = None
    """Policy version it samples with; None before the first one."""
    is_made: bool = False
    """It holds weights; those of a newcomer may be too old to sample with."""
    wanted_version: int = 0
    """The version it was last told to hold."""
    paused: bool = False
    """Told to sample nothing until it is resumed; it keeps its requests."""
    num_pauses_open: int = 0
    """Pauses it was told and has not confirmed; resumes may have crossed them."""
    leaving: str | None = None
    """Why it is given no new requests and yields once it has none."""
    told_to_yield: bool = False
    in_flight: dict[str, Generation] = field(default_factory=dict)
    outstanding: int = 0
    """Tokens it still has to prefill or sample, estimated; the sum over what is in flight."""
    moving: set[str] = field(default_factory=set)
    """Requests it was told to give back, for others to go on with."""
    num_tokens: int = 0
    serving_since: float | None = None
    """When it first confirmed a version, in monotonic seconds."""
    heard_at: float = field(default_factory=time.monotonic)
    """When it last said something, or was given work after it had none."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """It has yielded, or its connection is closed or given up."""

    @property
    def is_routable(self) -> bool:
        return (
            self.version is not None and not self.paused and self.leaving is None and not self.gone.is_set()
        )

    @property
    def has_room(self) -> bool:
        return self.is_routable and len(self.in_flight) < self.max_running

    def can_take(self, generation: Generation) -> bool:
        return self.has_room and self.version is not None and self.version >= generation.floor

    @property
    def is_still(self) -> bool:
        """It samples nothing, by its own word."""
        return self.paused and not self.num_pauses_open

    @property
    def state(self) -> LinkState:
        """One word for people."""
        if self.version is None:
            return "loading"
        if self.leaving is not None:
            return "leaving"
        return "paused" if self.paused else "serving"

    def queue(self) -> Queue[Generation]:
        """As rebalancing.py sees it."""
        return Queue(
            self.outstanding,
            self.max_running - len(self.in_flight),
            lambda: [
                Running(g, g.num_tokens, g.num_prefill + g.num_decode, g.num_moved_at)
                for g in self.in_flight.values()
            ],
        )

    def tell(self, frame: bytes) -> None:
        """Send what it has to answer; call it before noting what is expected."""
        self._expect()
        self.send(frame)

    def silent_for(self, now: float) -> float:
        """Seconds since it should have said something; 0 while nothing is expected of it."""
        return now - self.heard_at if self._owes_an_answer else 0.0

    def _expect(self) -> None:
        """From now on its silence counts, if it did not before."""
        if not self._owes_an_answer:
            self.heard_at = time.monotonic()

    @property
    def _owes_an_answer(self) -> bool:
        # making an engine takes as long as it takes: nothing is expected before its first version
        return self.is_made and (
            (bool(self.in_flight) and not self.is_still)
            or self.num_pauses_open > 0
            or self.version is None
            or self.wanted_version > self.version
            or self.told_to_yield
        )

    def take(self, generation: Generation, num_prefill: int, num_decode: int) -> None:
        """Count a generation that is about to be submitted."""
        self._expect()
        self.in_flight[generation.request_id] = generation
        generation.num_prefill, generation.num_decode = num_prefill, num_decode
        self.outstanding += num_prefill + num_decode

    def progressed(self, generation: Generation, num_tokens: int) -> None:
        """It sampled: the prompt is in its KV, and so many tokens fewer are to come."""
        done = generation.num_prefill + min(num_tokens, generation.num_decode)
        generation.num_decode -= done - generation.num_prefill
        generation.num_prefill = 0
        self.outstanding -= done

    def expect_more(self, generation: Generation, num_decode: int) -> None:
        """It sampled all that was expected, and goes on."""
        generation.num_decode += num_decode
        self.outstanding += num_decode

    def drop(self, request_id: str) -> Generation | None:
        """No longer in flight here; None if it was not."""
        self.moving.discard(request_id)
        generation = self.in_flight.pop(request_id, None)
        if generation is not None:
            self.outstanding -= generation.num_prefill + generation.num_decode
            generation.num_prefill = generation.num_decode = 0
        return generation
