"""A router with engines on one event loop: real frames, the real driver of engines that step, no sockets. The
test decides when each frame is delivered."""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sf_core.dataplane.routing.connection import EngineConnection
from sf_core.dataplane.routing.generation import CacheHint, Generation
from sf_core.dataplane.routing.router import Router
from sf_core.dataplane.routing.wait_queue import QueueLimits
from sf_core.engines import wire
from sf_core.engines.drivers.step_driver import StepDriver
from sf_core.engines.protocol import StepEngine, StepFailedError
from sf_core.engines.scripted import ScriptedEngine, scripted_logprob
from sf_core.types import Chunk, FinishReason, GenerationRequest, Sampling, WeightsRef

LIMITS = QueueLimits(max_waiting=1000, patience_s=1000.0, engine_silence_s=1000.0)

STOP = 1

MakeEngine = Callable[[], StepEngine]


def scripted(script: Callable[[list[int], int], list[int]]) -> MakeEngine:
    return lambda: ScriptedEngine(script)


class ProcessEnded(BaseException):
    """The end of an engine's process, raised by its step."""


class ClusterEngine:
    """One engine and its connection. It handles and sends frames only in `act`."""

    def __init__(self, router: Router, name: str, make: MakeEngine, max_running: int) -> None:
        self.router = router
        self.inbox: list[bytes] = []
        self.asked: list[GenerationRequest] = []
        self.told: list[wire.ToEngine] = []
        """All other frames from the router."""
        self.num_sampled = 0
        """Number of tokens that it has reported."""
        self.has_failed = False
        """Whether it ended in a step."""
        self.engine = make()
        self._driver = StepDriver(self.engine)
        self._driver.send = self.send
        self.connection = EngineConnection(name, name, name, 1, max_running, self._deliver)
        router.add(self.connection)

    def _deliver(self, frame: bytes) -> None:
        told = wire.read_from_data_plane(frame)
        if isinstance(told, wire.Submit):
            self.asked += told.whole_requests()
        else:
            self.told.append(told)
        self.inbox.append(frame)

    @property
    def is_gone(self) -> bool:
        return self.connection.disconnected.is_set()

    def abort(self, request_ids: list[str]) -> None:
        """Give requests back that the engine cannot go on with."""
        self._driver.handle(wire.Abort(request_ids))

    def act(self) -> None:
        """Handle the frames received, then take one step, which may end the engine."""
        while self.inbox and not self.is_gone:
            self._driver.handle(wire.read_from_data_plane(self.inbox.pop(0)))
        if not self.is_gone and self._driver.has_work:
            try:
                self._driver.step()
            except (StepFailedError, ProcessEnded):
                self.has_failed = True
                self.die()

    def send(self, frame: bytes) -> None:
        """Deliver a frame of the engine to the router."""
        match wire.read_from_engine(frame):
            case wire.Chunks(chunks):
                self.num_sampled += sum(len(chunk.token_ids) for chunk in chunks)
                self.router.receive(self.connection, chunks)
            case wire.Updated(version):
                self.router.confirm(self.connection, version)
            case wire.EnginePaused():
                self.router.confirm_pause(self.connection)
            case wire.Yielded():
                self.router.disconnect(self.connection)

    def die(self) -> None:
        self.router.disconnect(self.connection)

    def supersede(self) -> None:
        """Have a newer start of its lease take its place."""
        self.router.disconnect(self.connection, None)


class Cluster:
    """A router and its engines; must be created in a running event loop."""

    def __init__(self, limits: QueueLimits = LIMITS, weights: str = "w0") -> None:
        """`weights` is the folder of version 0."""
        self.router = Router(WeightsRef(0, weights), limits)
        self.engines: list[ClusterEngine] = []
        self.generations: list[Generation] = []
        self._names = itertools.count()

    def connect(self, make: MakeEngine, max_running: int = 8, name: str | None = None) -> ClusterEngine:
        name = name or f"e{next(self._names)}"
        self.engines.append(ClusterEngine(self.router, name, make, max_running))
        return self.engines[-1]

    async def serving(self, make: MakeEngine, **options: Any) -> ClusterEngine:
        """Connect an engine and let it start serving."""
        engine = self.connect(make, **options)
        while engine.connection.version is None:
            engine.act()
        await self.dispatched()
        return engine

    def ask(
        self,
        prompt_ids: Sequence[int],
        max_tokens: int,
        *,
        stop: tuple[int, ...] = (),
        floor: int = 0,
        stream: bool = False,
        sampling: Sampling | None = None,
        grammar: str = "",
    ) -> Generation:
        number = len(self.generations)
        sampling = sampling or Sampling(seed=number)
        request = GenerationRequest(
            f"g{number}", array("i", prompt_ids), 0, max_tokens, stop, sampling, stream, grammar
        )
        generation = Generation(request, floor=floor)
        self.generations.append(generation)
        self.router.submit(generation)
        return generation

    async def dispatched(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0)

    async def run(self, max_rounds: int = 500) -> None:
        """Let every engine act until every generation is over."""
        for _ in range(max_rounds):
            await self.dispatched()
            if all(generation.is_over for generation in self.generations):
                return
            for engine in self.engines:
                engine.act()
        raise AssertionError("generations are left over")


def turn(
    num_prompt: int, near: CacheHint | None = None, max_tokens: int = 100, stream: bool = False
) -> Generation:
    """A generation that no router has yet."""
    request = GenerationRequest("g", array("i", [5] * num_prompt), 0, max_tokens, (), Sampling(), stream)
    generation = Generation(request, floor=0)
    generation.cache_hint = near
    return generation


def script(prompt_ids: list[int], seed: int) -> list[int]:
    random = np.random.default_rng([seed, len(prompt_ids)])
    return [*random.integers(2, 300, random.integers(0, 40)).tolist(), STOP]


def check_tokens(generation: Generation) -> None:
    asked = generation.request
    expected = script(list(asked.prompt_ids), asked.sampling.seed)[: asked.max_tokens]
    token_ids = generation.token_ids.tolist()
    versions = generation.versions.tolist()
    if generation.cancelled is None:
        assert token_ids == expected
        assert generation.finish_reason == ("stop" if expected[-1] == STOP else "length")
    assert token_ids == expected[: len(token_ids)]
    assert versions == sorted(versions) and all(v >= 0 for v in versions)
    assert generation.logprobs.tolist() == [
        scripted_logprob(token, i, version)
        for i, (token, version) in enumerate(zip(token_ids, versions, strict=True))
    ]


def chunk(ids: list[int], reason: FinishReason | None = None, version: int = 0) -> Chunk:
    return Chunk("g", ids, [-1.0] * len(ids), version, reason)
