"""Guarantees of the router whatever happens to engines, without sockets, so that thousands of orders of
events are tried."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from sf_core.dataplane.routing.wait_queue import assign_trials
from sf_core.engines import wire
from sf_core.types import WeightsRef
from tests.bench import dataplane
from tests.bench.properties import examples
from tests.bench.waits import patience


class Events:
    """Everything that can happen to a run's engines, drawn by Hypothesis one event at a time."""

    def __init__(self, data: st.DataObject) -> None:
        self.draw: Callable[[Any], Any] = data.draw
        self.cluster = dataplane.router.Cluster()
        self.router = self.cluster.router
        self.version = 0
        self.published = 0
        """Lowest version with which requests dispatched from now on may be sampled."""
        self.pending: list[asyncio.Task[Any]] = []

    def living(self) -> list[dataplane.router.ClusterEngine]:
        return [engine for engine in self.cluster.engines if not engine.is_gone]

    def some_engine(self) -> dataplane.router.ClusterEngine | None:
        living = self.living()
        return self.draw(st.sampled_from(living)) if living else None

    def later(self, waiting: Awaitable[Any]) -> None:
        self.pending.append(asyncio.ensure_future(waiting))

    def ask(self) -> None:
        self.cluster.ask(
            list(range(self.draw(st.integers(1, 12)))),
            self.draw(st.integers(1, 30)),
            stop=(dataplane.router.STOP,),
            floor=self.draw(st.integers(0, self.version)),
            stream=self.draw(st.booleans()),
        )

    def connect(self) -> None:
        self.cluster.connect(
            dataplane.router.scripted(dataplane.router.script), max_running=self.draw(st.integers(1, 3))
        )

    def act(self) -> None:
        if (engine := self.some_engine()) is not None:
            engine.act()

    def die(self) -> None:
        if (engine := self.some_engine()) is not None:
            without_token = [*engine.connection.without_token.values()]
            # twice the only suspect in a row is not by chance
            has_chance = len(without_token) != 1 or not without_token[0].num_faults
            (engine.die if has_chance else engine.supersede)()

    def drain(self) -> None:
        if (engine := self.some_engine()) is not None:
            self.router.drain(engine.connection, "drained")

    def take_away(self) -> None:
        if (engine := self.some_engine()) is not None:
            self.later(self.router.revoke(engine.connection, "revoked"))

    def pause(self) -> None:
        mode = self.draw(st.sampled_from(["freeze", "evacuate"]))
        engine = self.draw(st.sampled_from([None, self.some_engine()]))
        self.later(self.router.pause(mode, engine and engine.connection.engine_id))

    def resume(self) -> None:
        engine = self.draw(st.sampled_from([None, self.some_engine()]))
        self.router.resume(engine and engine.connection.engine_id)

    def update(self) -> None:
        self.version += 1
        self.later(self.publish(self.version))

    async def publish(self, version: int) -> None:
        await self.router.update(WeightsRef(version, "w"))
        self.published = max(self.published, version)

    def sweep(self) -> None:
        self.router.enforce_limits()

    def cancel(self) -> None:
        if self.cluster.generations:
            self.router.cancel(self.draw(st.sampled_from(self.cluster.generations)), "the client went away")

    async def settle(self) -> None:
        """Undo all faults and connect one more engine, so that all requests must finish."""
        for engine_id in list(self.router.paused):
            self.router.resume(engine_id)
        self.cluster.connect(dataplane.router.scripted(dataplane.router.script))
        await self.cluster.run()
        for _ in range(20):
            for engine in self.living():
                engine.act()
            await self.cluster.dispatched()
        await asyncio.wait_for(asyncio.gather(*self.pending), patience())


EVENTS = st.sampled_from(
    ["ask"] * 4
    + ["act"] * 8
    + ["connect"] * 2
    + ["sweep"] * 3
    + ["die", "drain", "take_away", "pause", "resume", "resume", "update", "update", "cancel"]
)


@settings(max_examples=examples(100), deadline=None)
@given(data=st.data(), events=st.lists(EVENTS, min_size=20, max_size=60))
async def test_whatever_happens_every_generation_ends_whole_and_in_order(
    data: st.DataObject, events: list[str]
) -> None:
    cluster = (happening := Events(data)).cluster
    happening.connect()
    for event in events:
        asked_before = {id(engine): len(engine.asked) for engine in cluster.engines}
        published = happening.published
        getattr(happening, event)()
        await cluster.dispatched()
        check_dispatch(cluster, asked_before, published)
        check_connections(cluster)
    await happening.settle()
    for generation in cluster.generations:
        dataplane.router.check_tokens(generation)
    connections = [engine.connection for engine in cluster.engines]
    assert not any(connection.in_flight or connection.outstanding for connection in connections)


class Training(Events):
    """A fleet without faults in which some engines are lent: training revokes them and lends others."""

    def __init__(self, data: st.DataObject) -> None:
        super().__init__(data)
        for _ in range(self.draw(st.integers(1, 3))):
            self.connect()
        self.dedicated = list(self.cluster.engines)
        self.revoked: dict[dataplane.router.ClusterEngine, int] = {}
        """Revoked engines, and how many requests each had been given by then."""
        self.released: dict[dataplane.router.ClusterEngine, int] = {}
        """Engines that have yielded, and how many frames each had been sent by then."""

    def lent(self) -> list[dataplane.router.ClusterEngine]:
        return [engine for engine in self.living() if engine not in self.dedicated]

    def train(self) -> None:
        for engine in self.lent():
            self.later(self.take(engine))
            self.revoked[engine] = len(engine.asked)

    async def take(self, engine: dataplane.router.ClusterEngine) -> None:
        await self.router.revoke(engine.connection, "revoked")
        self.released[engine] = len(engine.asked) + len(engine.told)

    def check(self) -> None:
        """Check the router's part in invariants 6 and 7."""
        for engine, num_asked in self.revoked.items():
            assert len(engine.asked) == num_asked
        for engine, num_frames in self.released.items():
            assert len(engine.asked) + len(engine.told) == num_frames
            assert not engine.connection.in_flight
        # a request moves when another queue is shorter, one by one, and for no other reason
        told = [frame for engine in self.dedicated for frame in engine.told]
        aborts = [frame.request_ids for frame in told if isinstance(frame, wire.Abort)]
        assert all(aborts) and sum(map(len, aborts)) <= self.router.moves
        assert not [frame for frame in told if isinstance(frame, wire.Pause | wire.Yield)]
        # whatever an engine sampled, lent ones too, is part of an answer
        assert all(engine.num_sampled == engine.connection.num_tokens for engine in self.cluster.engines)


@settings(max_examples=examples(50), deadline=None)
@given(
    data=st.data(),
    events=st.lists(
        st.sampled_from(["ask"] * 4 + ["act"] * 8 + ["connect"] * 2 + ["sweep", "train", "train", "update"]),
        min_size=20,
        max_size=60,
    ),
)
async def test_training_takes_devices_that_are_lent_and_nothing_from_the_others(
    data: st.DataObject, events: list[str]
) -> None:
    happening = Training(data)
    for event in events:
        getattr(happening, event)()
        await happening.cluster.dispatched()
        happening.check()
    await happening.settle()
    happening.check()
    generations = happening.cluster.generations
    assert sum(e.num_sampled for e in happening.cluster.engines) == sum(len(g.token_ids) for g in generations)
    for generation in generations:
        dataplane.router.check_tokens(generation)


def check_dispatch(cluster: dataplane.router.Cluster, asked_before: dict[int, int], published: int) -> None:
    router = cluster.router
    waiting = list(router.waiting)
    assert [g.arrival for g in waiting] == sorted(g.arrival for g in waiting if g.arrival is not None)
    if None not in router.paused:
        # work conserving: nobody waits for an engine that may take it
        trials = assign_trials(router.waiting.suspects, router.engines)
        assert not [g for g in waiting for c in router.engines if c.can_take(g, trials.get(c))]
    by_id = {generation.request_id: generation for generation in cluster.generations}
    for engine in cluster.engines:
        for request in engine.asked[asked_before.get(id(engine), 0) :]:
            generation = by_id[request.request_id]
            version = engine.connection.version
            assert version is not None and version >= max(generation.floor, published)
            # whoever waits and came before could not have been given to this engine
            trial = trials.get(engine.connection)
            could = [g for g in waiting if g.floor <= version and g.suspicion is trial]
            assert not [g for g in could if g.arrival < generation.arrival]  # type: ignore[operator]


def check_connections(cluster: dataplane.router.Cluster) -> None:
    places = [id for engine in cluster.engines for id in engine.connection.in_flight]
    places += [generation.request_id for generation in cluster.router.waiting]
    assert sorted(places) == sorted(g.request_id for g in cluster.generations if not g.is_over)
    for engine in cluster.engines:
        connection = engine.connection
        assert len(connection.in_flight) <= connection.max_running
        assert connection.moving <= connection.in_flight.keys()
        assert connection.outstanding == sum(
            g.num_prefill + g.num_decode for g in connection.in_flight.values()
        )
