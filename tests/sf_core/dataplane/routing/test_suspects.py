"""Requests that end engines: each is found by few deaths and refused alone, whatever else happens."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sf_core.dataplane.errors import EngineFailed
from sf_core.dataplane.routing.generation import Generation
from sf_core.dataplane.routing.wait_queue import MAX_FAULTS, QueueLimits
from tests import bench
from tests.bench.dataplane import router
from tests.bench.properties import examples

POISON = 299
"""Ends the engine that processes it."""

BAD_ROW = 298
"""Ends its own request."""


def fatal(prompt_ids: list[int], seed: int) -> list[int]:
    """A script in which prompts that begin with 1 sample what ends engines."""
    ids = [3 if id >= BAD_ROW else id for id in router.script(prompt_ids, seed)]
    middle = len(ids) // 2
    return [*ids[:middle], POISON, *ids[middle:]] if prompt_ids[0] == 1 else ids


def end_process() -> None:
    raise router.ProcessEnded


def ending(end: Callable[[], object]) -> router.MakeEngine:
    return lambda: bench.engines.fatal.FatalEngine(fatal, end, POISON, BAD_ROW)


PROCESS = ending(end_process)
STEP = ending(bench.engines.fatal.fail)


def most_deaths(num_together: int) -> int:
    """Engines that a request may cost that was one of so many."""
    return math.ceil(math.log2(num_together)) + MAX_FAULTS


def is_refused_as_poison(generation: Generation) -> bool:
    return isinstance(generation.refusal, EngineFailed) and generation.refusal.is_poison


class Fleet(router.Cluster):
    """A cluster in which a new engine comes for each that has ended."""

    async def run_on(self, make: router.MakeEngine, num_engines: int, max_running: int = 64) -> int:
        """Until all is over; returns how many engines ended in a step."""
        for _ in range(3000):
            while len([engine for engine in self.engines if not engine.is_gone]) < num_engines:
                self.connect(make, max_running)
            await self.dispatched()
            if all(generation.is_over for generation in self.generations):
                return sum(engine.has_failed for engine in self.engines)
            for engine in self.engines:
                engine.act()
        raise AssertionError("generations are left over")


@pytest.mark.parametrize("make", [PROCESS, STEP])
@pytest.mark.parametrize("num_engines", [1, 2, 5])
@pytest.mark.parametrize("num_requests", [1, 2, 3, 64])
async def test_one_poison_is_refused_alone_and_costs_few_engines(
    make: router.MakeEngine, num_engines: int, num_requests: int
) -> None:
    cluster = Fleet()
    for number in range(num_requests):
        cluster.ask([0, 5, POISON if number == num_requests // 3 else 6], 8, stop=(router.STOP,))
    assert await cluster.run_on(make, num_engines) <= most_deaths(num_requests)
    poison = cluster.generations.pop(num_requests // 3)
    assert is_refused_as_poison(poison) and poison.refusal is not None and poison.refusal.status == 502
    for generation in cluster.generations:
        check_answer(generation)


async def test_requests_are_answered_elsewhere_while_suspects_are_tried() -> None:
    cluster = router.Cluster()
    make = router.scripted(router.script)
    first = await cluster.serving(make)
    for _ in range(4):
        cluster.ask([0, 5], 8)
    await cluster.dispatched()
    first.die()
    one = await cluster.serving(make)
    other = await cluster.serving(make)
    later = cluster.ask([0, 7], 8)
    await cluster.dispatched()
    tried = [engine for engine in (one, other) if len(engine.asked) == 2]
    assert len(tried) == 1 and all(request.stream for request in tried[0].asked)
    [left] = {one, other} - {*tried}
    assert [request.request_id for request in left.asked] == [later.request_id]
    await cluster.run()


async def test_an_engine_that_ended_with_suspects_is_not_the_first_to_try_them_again() -> None:
    cluster = Fleet()
    sound = router.scripted(router.script)
    for _ in range(3):
        cluster.ask([0, 5, POISON], 8)
    for _ in range(5):
        engine = await cluster.serving(PROCESS, name="broken")
        if engine.asked:
            engine.act()
        else:
            engine.supersede()
        for _ in range(3):
            if not [e for e in cluster.engines if not e.is_gone and e.connection.worker != "broken"]:
                cluster.connect(sound)
            cluster.engines[-1].act()
            await cluster.dispatched()
    await cluster.run_on(sound, 1)
    assert [generation.refusal for generation in cluster.generations] == [None] * 3


async def test_suspects_that_no_engine_tries_are_refused_in_words_in_the_end() -> None:
    cluster = router.Cluster(QueueLimits(max_waiting=9, patience_s=0.0, engine_silence_s=1000.0))
    engine = await cluster.serving(router.scripted(router.script))
    generation = cluster.ask([0, 5], 8)
    await cluster.dispatched()
    engine.die()
    await asyncio.sleep(0.001)
    cluster.router.enforce_limits()
    assert generation.refusal is not None and generation.refusal.status == 503
    told = "it may have ended an engine and must be tried alone, but no engine is connected"
    assert told in generation.refusal.message


async def test_an_engine_that_a_request_silences_counts_as_ended() -> None:
    cluster = router.Cluster(QueueLimits(max_waiting=9, patience_s=1000.0, engine_silence_s=0.0))
    generation = cluster.ask([0, 5], 8)
    for _ in range(MAX_FAULTS):
        await cluster.serving(router.scripted(router.script))
        await asyncio.sleep(0.001)
        cluster.router.enforce_limits()
        await cluster.dispatched()
    assert is_refused_as_poison(generation)
    assert "sent nothing for 0 s while it worked on this request, as an engine did before" in str(
        generation.refusal
    )


@pytest.mark.parametrize("end", ["drain", "take_away", "supersede"])
async def test_engines_that_are_taken_away_count_nothing(end: str) -> None:
    cluster = router.Cluster()
    generation = cluster.ask([0, 5], 8)
    drain_reason = list[asyncio.Task[Any]]()
    for _ in range(3 * MAX_FAULTS):
        engine = await cluster.serving(router.scripted(router.script))
        if end == "drain":
            cluster.router.drain(engine.connection, "drained")
        if end == "take_away":
            drain_reason.append(asyncio.ensure_future(cluster.router.revoke(engine.connection, "revoked")))
            await cluster.dispatched()
        (engine.supersede if end == "supersede" else engine.die)()
    assert (generation.num_faults, generation.suspicion) == (0, None)
    await cluster.serving(router.scripted(router.script))
    await cluster.run()
    check_answer(generation, router.script)
    await asyncio.gather(*drain_reason)


def check_answer(generation: Generation, scripted: Callable[..., list[int]] = fatal) -> None:
    asked = generation.request
    assert generation.refusal is None
    assert [*generation.token_ids] == scripted([*asked.prompt_ids], asked.sampling.seed)[: asked.max_tokens]


class Attacks:
    """Requests of all kinds, and everything that happens to engines, drawn by Hypothesis."""

    def __init__(self, data: st.DataObject) -> None:
        self.draw: Callable[[Any], Any] = data.draw
        self.cluster = Fleet()
        self.router = self.cluster.router
        self.make = self.draw(st.sampled_from([PROCESS, STEP]))
        self.max_running = self.draw(st.sampled_from([1, 2, 3, 8]))
        self.num_by_chance = 0
        self.pending: list[asyncio.Task[Any]] = []
        self.poison: list[Generation] = []
        self.bad_rows: list[Generation] = []

    def some_engine(self) -> router.ClusterEngine | None:
        living = [engine for engine in self.cluster.engines if not engine.is_gone]
        return self.draw(st.sampled_from(living)) if living else None

    def _ask(self, prompt_ids: list[int]) -> Generation:
        prompt_ids += [2] * self.draw(st.integers(0, 5))
        # the engine sees what it has reported
        stream = prompt_ids[0] == 1 or self.draw(st.booleans())
        return self.cluster.ask(prompt_ids, 40, stop=(router.STOP,), stream=stream)

    def ask(self) -> None:
        self._ask([0])

    def ask_poison(self) -> None:
        if len(self.poison) < 3:
            # in the prompt, or sampled later
            self.poison.append(self._ask(self.draw(st.sampled_from([[0, POISON], [1]]))))

    def ask_bad_row(self) -> None:
        self.bad_rows.append(self._ask([0, BAD_ROW]))

    def connect(self) -> None:
        self.cluster.connect(self.make, self.max_running)

    def act(self) -> None:
        if (engine := self.some_engine()) is not None:
            engine.act()

    def end_by_chance(self) -> None:
        engine = self.some_engine()
        if engine is not None and self.num_by_chance < MAX_FAULTS - 1:
            self.num_by_chance += 1
            engine.die()

    def supersede(self) -> None:
        if (engine := self.some_engine()) is not None:
            engine.supersede()

    def take_away(self) -> None:
        if (engine := self.some_engine()) is not None:
            self.pending.append(asyncio.ensure_future(self.router.revoke(engine.connection, "revoked")))

    def drain(self) -> None:
        if (engine := self.some_engine()) is not None:
            self.router.drain(engine.connection, "drained")

    def sweep(self) -> None:
        self.router.enforce_limits()


@settings(max_examples=examples(100), deadline=None)
@given(
    data=st.data(),
    events=st.lists(
        st.sampled_from(
            ["ask"] * 5
            + ["ask_poison", "ask_bad_row"]
            + ["act"] * 8
            + ["connect"] * 2
            + ["end_by_chance", "supersede", "take_away", "drain", "sweep"]
        ),
        min_size=20,
        max_size=60,
    ),
)
async def test_any_row_may_raise_and_any_engine_may_end_at_any_step(
    data: st.DataObject, events: list[str]
) -> None:
    happening = Attacks(data)
    cluster = happening.cluster
    for event in events:
        getattr(happening, event)()
        await cluster.dispatched()
    num_failed = await cluster.run_on(happening.make, data.draw(st.integers(1, 3)), happening.max_running)
    # one more for a request that got tokens before it sampled the one that ends engines
    assert num_failed <= len(happening.poison) * (most_deaths(happening.max_running) + 1)
    for generation in cluster.generations:
        if generation in happening.poison:
            assert is_refused_as_poison(generation)
        elif generation in happening.bad_rows:
            refusal = generation.refusal
            assert isinstance(refusal, EngineFailed) and not refusal.is_poison
            assert "failed (a bad row)" in refusal.message
        else:
            check_answer(generation)
    connections = [engine.connection for engine in cluster.engines]
    assert not any(c.in_flight or c.without_token or c.outstanding for c in connections)
    for engine in cluster.engines:
        engine.act()
    await asyncio.wait_for(asyncio.gather(*happening.pending), bench.waits.patience())
