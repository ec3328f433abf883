"""A connected engine as the router sees it: the commands sent, the state confirmed, the requests in flight.

Owns this state and the token sums over the requests in flight. router.py and choice.py decide.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from sf_core.dataplane.routing.generation import Generation, Suspicion
from sf_core.dataplane.routing.rebalancing import EngineQueue, RunningRequest
from sf_core.types import Chunk, FinishReason

EngineState = Literal["loading", "leaving", "paused", "serving"]


class EngineFaultError(ValueError):
    """An engine sent something invalid; the message is a predicate whose subject is the engine."""


@dataclass(eq=False)
class EngineConnection:
    engine_id: str
    lease_id: str
    worker: str
    attempt: int
    max_running: int
    send: Callable[[bytes], None]
    version: int | None = None
    """Policy version with which the engine samples; None before it has loaded one."""
    has_loaded: bool = False
    """Whether the engine has loaded weights. The first weights of a new engine may be too old to sample
    with."""
    wanted_version: int = 0
    """The version that the engine was last told to load."""
    first_version: int = 0
    """The version that the engine was told to load when it connected."""
    refused_version: int = -1
    """The last version that the engine could not load."""
    refusal: str = ""
    """Why the engine could not load it."""
    paused: bool = False
    """Whether the engine was told to sample nothing until it is resumed. It keeps its requests."""
    num_unconfirmed_pauses: int = 0
    """Number of pause commands that the engine has not confirmed; a resume may have been sent since."""
    drain_reason: str | None = None
    """Why the engine is drained: it gets no new requests, and yields once it has none. None while it is
    not."""
    yield_requested: bool = False
    in_flight: dict[str, Generation] = field(default_factory=dict)
    without_token: dict[str, Generation] = field(default_factory=dict)
    """Requests in flight that have got no token since they were submitted to this engine."""
    outstanding: int = 0
    """Estimated tokens that the engine still has to prefill or sample, summed over the requests in flight."""
    moving: set[str] = field(default_factory=set)
    """Ids of requests that the engine was told to abort, so that other engines continue them."""
    num_tokens: int = 0
    """Number of tokens that the engine has sampled."""
    serving_since: float | None = None
    """When the engine first confirmed a version, in monotonic seconds."""
    last_heard_at: float = field(default_factory=time.monotonic)
    """When the engine last sent something, or when an answer became due; in monotonic seconds."""
    disconnected: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the engine has yielded, or its connection is closed or given up."""
    served_s: float = 0.0
    """Seconds in which the engine took requests, up to the last `count_time`."""
    idle_s: float = 0.0
    """The part of `served_s` in which the engine had no request."""
    counted_at: float = field(default_factory=time.monotonic)
    """When `count_time` was called last, in monotonic seconds."""

    @property
    def refusal_reason(self) -> str:
        """Why the engine uses other weights than it was told to load; empty if it does not."""
        has_refused = self.refused_version == self.wanted_version
        if self.version is None or not has_refused or self.version >= self.wanted_version:
            return ""
        return (
            f"engine {self.engine_id} still uses version {self.version}, because it refuses version "
            f"{self.refused_version}: {self.refusal}"
        )

    @property
    def is_routable(self) -> bool:
        return (
            self.version is not None
            and not self.paused
            and self.drain_reason is None
            and not self.disconnected.is_set()
        )

    @property
    def has_room(self) -> bool:
        return self.is_routable and len(self.in_flight) < self.max_running

    def has_version(self, floor: int) -> bool:
        """Whether the engine samples with this policy version or a later one."""
        return self.version is not None and self.version >= floor

    @property
    def suspects_on_trial(self) -> Suspicion | None:
        """The suspects that the engine tries; None if it tries none."""
        return next((generation.suspicion for generation in self.without_token.values()), None)

    def can_take(self, generation: Generation, suspects_on_trial: Suspicion | None = None) -> bool:
        """Whether the engine can get a request. `trial`: the suspects that it tries, or will try; None:
        none."""
        if not (
            self.has_room and self.has_version(generation.floor) and generation.suspicion is suspects_on_trial
        ):
            return False
        # suspects are tried alone
        is_free_for_trial = not self.without_token or self.suspects_on_trial is suspects_on_trial
        return suspects_on_trial is None or is_free_for_trial

    @property
    def has_stopped(self) -> bool:
        """Whether the engine has confirmed that it samples nothing."""
        return self.paused and not self.num_unconfirmed_pauses

    @property
    def state(self) -> EngineState:
        """One word for status and metrics."""
        if self.version is None:
            return "loading"
        if self.drain_reason is not None:
            return "leaving"
        return "paused" if self.paused else "serving"

    def queue(self) -> EngineQueue[Generation]:
        """The engine in the form that rebalancing.py takes."""
        return EngineQueue(
            self.outstanding,
            self.max_running - len(self.in_flight),
            lambda: [
                RunningRequest(
                    generation,
                    generation.num_tokens,
                    generation.num_prefill + generation.num_decode,
                    generation.num_moved_at,
                )
                for generation in self.in_flight.values()
            ],
        )

    def send_expecting_answer(self, frame: bytes) -> None:
        """Send a frame that the engine must answer. Call this before setting the field that makes the answer
        due."""
        self._start_waiting()
        self.send(frame)

    def silent_for(self, now: float) -> float:
        """Seconds for which an answer has been due; 0 while no answer is."""
        return now - self.last_heard_at if self._owes_an_answer else 0.0

    def _start_waiting(self) -> None:
        """Count silence from now on, unless an answer was due already."""
        if not self._owes_an_answer:
            self.last_heard_at = time.monotonic()

    @property
    def _owes_an_answer(self) -> bool:
        # starting an engine may take any time: no answer is due before its first weights are loaded
        return self.has_loaded and (
            self.yield_requested
            or self.num_unconfirmed_pauses > 0
            or (bool(self.in_flight) and not self.has_stopped)
            or self.version is None
            or self.wanted_version > max(self.version, self.refused_version)
        )

    def add_request(self, generation: Generation, num_prefill: int, num_decode: int) -> None:
        """Count a generation that is about to be submitted."""
        self._start_waiting()
        self.count_time()
        self.in_flight[generation.request_id] = generation
        self.without_token[generation.request_id] = generation
        generation.num_prefill = num_prefill
        generation.num_decode = num_decode
        self.outstanding += num_prefill + num_decode

    def record_first_token(self, generation: Generation) -> None:
        """Record that a request got a token: it does not end the engine."""
        if self.without_token.pop(generation.request_id, None) is not None:
            generation.suspicion = None
            generation.num_faults = 0

    def record_progress(self, generation: Generation, num_tokens: int) -> None:
        """Count sampled tokens: the prompt is in the KV cache, and that many fewer are outstanding."""
        num_decoded = min(num_tokens, generation.num_decode)
        self.outstanding -= generation.num_prefill + num_decoded
        generation.num_prefill = 0
        generation.num_decode -= num_decoded

    def extend_estimate(self, generation: Generation, num_decode: int) -> None:
        """Count further tokens of a generation that has sampled the expected number and is not finished."""
        generation.num_decode += num_decode
        self.outstanding += num_decode

    def remove_request(self, request_id: str) -> Generation | None:
        """Remove and return a generation that is no longer in flight on this engine; None if it was not."""
        self.moving.discard(request_id)
        self.without_token.pop(request_id, None)
        self.count_time()
        generation = self.in_flight.pop(request_id, None)
        if generation is not None:
            self.outstanding -= generation.num_prefill + generation.num_decode
            generation.num_prefill = 0
            generation.num_decode = 0
        return generation

    def count_time(self) -> None:
        """Count the time since the last call by the engine's present state. Call this before each change of
        that state."""
        now = time.monotonic()
        elapsed_s = now - self.counted_at
        if self.is_routable:
            self.served_s += elapsed_s
            if not self.in_flight:
                self.idle_s += elapsed_s
        self.counted_at = now


def ends_without_a_token(chunk: Chunk, generation: Generation) -> bool:
    is_end = chunk.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    return is_end and not chunk.token_ids and not generation.token_ids


def has_loaded_or_refused(engine: EngineConnection) -> bool:
    return engine.version is not None and max(engine.version, engine.refused_version) >= engine.wanted_version


def has_stopped_or_need_not(engine: EngineConnection) -> bool:
    # an engine that is still starting samples nothing, and reads the pause before it does
    return engine.has_stopped or not engine.paused or engine.version is None


def find_obstacle(engines: Iterable[EngineConnection], floor: int, *, is_run_paused: bool) -> str:
    """Why a request that needs this policy version or a later one waits for one of these engines."""
    engines = [*engines]
    present = [engine for engine in engines if engine.version is not None and engine.drain_reason is None]
    if is_run_paused:
        return "the run is paused"
    if not present:
        is_loading = any(engine.version is None for engine in engines)
        return "no engine is loaded yet" if is_loading else "no engine is connected"
    if all(engine.paused for engine in present):
        return "every engine is paused"
    if all(engine.version is not None and engine.version < floor for engine in present):
        return f"no engine holds policy version {floor} or a later one"
    return "every engine is full"
