"""The router with requests and engines, without sockets, one event after the other."""

from __future__ import annotations

import asyncio

import pytest

from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.routing.wait_queue import QueueLimits
from sf_core.types import WeightsRef
from tests.bench.dataplane import router


async def test_evacuated_requests_keep_their_place_in_the_line() -> None:
    cluster = router.Cluster()
    first, second = [await cluster.serving(router.scripted(router.script), max_running=1) for _ in range(2)]
    asked = [cluster.ask([5] * 4, 20) for _ in range(5)]
    await cluster.dispatched()
    # the engine that got the later request loses it first
    for engine in (second, first):
        engine.die()
    assert list(cluster.router.waiting) == asked


async def test_a_frozen_engine_keeps_its_requests_and_an_evacuated_one_gives_them_back() -> None:
    cluster = router.Cluster()
    engine = await cluster.serving(router.scripted(lambda prompt, seed: [7] * 99))
    generation = cluster.ask([5], 50, stream=True)
    await cluster.dispatched()
    engine.act()
    frozen = asyncio.ensure_future(cluster.router.pause("freeze"))
    await cluster.dispatched()
    assert not frozen.done(), "the engine has not said that it stands still"
    for _ in range(3):
        engine.act()
    assert await frozen == 1
    assert (len(generation.token_ids), generation.interruptions) == (1, 0)
    evacuated = asyncio.ensure_future(cluster.router.pause("evacuate"))
    await cluster.dispatched()
    engine.act()
    await evacuated
    assert list(cluster.router.waiting) == [generation]
    assert generation.interruptions == 1
    cluster.router.resume()
    await cluster.run()
    assert generation.token_ids.tolist() == [7] * 50


async def test_weights_are_swapped_under_a_frozen_engine_without_an_interruption() -> None:
    cluster = router.Cluster()
    engine = await cluster.serving(router.scripted(lambda prompt, seed: [7] * 99))
    generation = cluster.ask([5], 9, stream=True)
    await cluster.dispatched()
    for _ in range(4):
        engine.act()
    changes = asyncio.gather(cluster.router.pause("freeze"), cluster.router.update(WeightsRef(1, "w1")))
    await cluster.dispatched()
    engine.act()
    assert await changes == [1, {"e0": 1}]
    cluster.router.resume()
    await cluster.run()
    assert (generation.versions.tolist(), generation.interruptions) == ([0] * 4 + [1] * 5, 0)


async def test_an_update_does_not_wait_for_a_newcomer_which_is_caught_up_before_it_is_routed_to() -> None:
    cluster = router.Cluster()
    serving = await cluster.serving(router.scripted(router.script), max_running=1)
    newcomer = cluster.connect(router.scripted(router.script))
    update = asyncio.ensure_future(cluster.router.update(WeightsRef(1, "w1")))
    await cluster.dispatched()
    assert not update.done(), "an engine samples with older weights"
    serving.act()
    assert await update == {"e0": 1}
    asked = [cluster.ask([5] * 3, 30, stop=(router.STOP,)) for _ in range(3)]
    # the engine is made of the weights it was greeted with, and says so before it reads on
    cluster.router.confirm(newcomer.connection, 0)
    await cluster.dispatched()
    assert (newcomer.connection.state, newcomer.asked) == ("loading", [])
    newcomer.act()
    await cluster.dispatched()
    assert (newcomer.connection.version, len(newcomer.asked)) == (1, 2)
    await cluster.run()
    assert {version for generation in asked for version in generation.versions} == {1}


async def test_an_update_waits_for_a_newcomer_that_is_made_so_that_it_cannot_stay_behind_for_ever() -> None:
    cluster = router.Cluster()
    newcomer = cluster.connect(router.scripted(router.script))
    await cluster.router.update(WeightsRef(1, "w1"))
    cluster.router.confirm(newcomer.connection, 0)
    update = asyncio.ensure_future(cluster.router.update(WeightsRef(2, "w2")))
    await cluster.dispatched()
    assert (newcomer.connection.state, update.done()) == ("loading", False)
    newcomer.act()
    assert await update == {"e0": 2}
    assert (newcomer.connection.state, newcomer.connection.version) == ("serving", 2)


async def test_an_engine_whose_making_hangs_holds_up_no_update() -> None:
    cluster = router.Cluster()
    hanging = cluster.connect(router.scripted(router.script))
    for version in (1, 2):
        assert await cluster.router.update(WeightsRef(version, "w")) == {}
    assert (hanging.connection.wanted_version, hanging.connection.state) == (2, "loading")


async def test_requests_of_a_paused_engine_continue_on_another() -> None:
    cluster = router.Cluster()
    first = await cluster.serving(router.scripted(router.script))
    generation = cluster.ask([5] * 3, 30, stop=(router.STOP,), stream=True)
    await cluster.dispatched()
    first.act()
    second = await cluster.serving(router.scripted(router.script))
    pausing = asyncio.ensure_future(cluster.router.pause("evacuate", first.connection.engine_id))
    await cluster.run()
    assert await pausing == 1
    assert [engine.connection.state for engine in (first, second)] == ["paused", "serving"]
    router.check_tokens(generation)
    assert generation.request_id in [request.request_id for request in second.asked]


async def test_a_pause_of_the_run_and_one_of_an_engine_are_lifted_one_by_one() -> None:
    cluster = router.Cluster()
    engine = await cluster.serving(router.scripted(router.script), name="e")
    cluster.router.resume("e")
    pauses = asyncio.gather(cluster.router.pause("freeze"), cluster.router.pause("freeze", "e"))
    await cluster.dispatched()
    engine.act()
    await pauses
    cluster.router.resume()
    assert engine.connection.paused and cluster.router.waiting_reason() == "every engine is paused"
    engine.die()
    again = await cluster.serving(router.scripted(router.script), name="e")
    assert again.connection.has_stopped, "a connection made again changes nothing"
    cluster.router.resume("e")
    assert again.connection.has_room


async def test_a_draining_engine_ends_what_it_has_and_takes_nothing_new() -> None:
    cluster = router.Cluster()
    engine = await cluster.serving(router.scripted(router.script), max_running=4)
    running = cluster.ask([5] * 3, 30, stop=(router.STOP,))
    await cluster.dispatched()
    cluster.router.drain(engine.connection, "drained")
    late = cluster.ask([5], 30)
    for _ in range(60):
        engine.act()
        await cluster.dispatched()
    assert engine.is_gone
    assert running.finish_reason is not None and running.interruptions == 0
    assert list(cluster.router.waiting) == [late]
    assert cluster.router.waiting_reason() == "no engine is connected"


async def test_an_engine_that_falls_silent_with_work_is_dropped_and_an_idle_one_is_not() -> None:
    cluster = router.Cluster(QueueLimits(max_waiting=10, patience_s=1000.0, engine_silence_s=30.0))
    busy, idle = [await cluster.serving(router.scripted(router.script)) for _ in range(2)]
    generation = cluster.ask([5] * 3, 30, stop=(router.STOP,))
    await cluster.dispatched()
    for engine in (busy, idle):
        engine.connection.last_heard_at -= 31
    cluster.router.enforce_limits()
    assert (busy.is_gone, idle.is_gone) == (True, False)
    await cluster.run()
    router.check_tokens(generation)


async def test_a_newcomer_gets_its_share_of_what_runs_already() -> None:
    cluster = router.Cluster()
    first = await cluster.serving(router.scripted(lambda prompt, seed: [7] * 99))
    asked = [cluster.ask([5] * 4, 60, stream=i % 2 == 0) for i in range(6)]
    await cluster.dispatched()
    for _ in range(5):
        first.act()
    newcomer = await cluster.serving(router.scripted(lambda prompt, seed: [7] * 99))
    cluster.router.enforce_limits()
    cluster.router.enforce_limits()
    moved = cluster.router.moves
    assert 1 <= moved < 4, "what is on its way is not counted twice"
    first.act()
    await cluster.dispatched()
    assert (len(first.connection.in_flight), len(newcomer.connection.in_flight)) == (6 - moved, moved)
    await cluster.run()
    assert [generation.token_ids.tolist() for generation in asked] == [[7] * 60] * 6
    assert {generation.finish_reason for generation in asked} == {"length"}
    assert sorted(generation.interruptions for generation in asked) == [0] * (6 - moved) + [1] * moved


async def test_nothing_is_moved_while_engines_take_new_weights_or_requests_wait() -> None:
    cluster = router.Cluster()
    first = await cluster.serving(router.scripted(lambda prompt, seed: [7] * 99), max_running=6)
    for _ in range(6):
        cluster.ask([5] * 4, 60)
    await cluster.dispatched()
    first.act()
    second = await cluster.serving(router.scripted(router.script))
    updating = asyncio.ensure_future(cluster.router.update(WeightsRef(1, "w1")))
    await cluster.dispatched()
    cluster.router.enforce_limits()
    assert (second.connection.version, first.connection.version, cluster.router.moves) == (0, 0, 0)
    second.act()
    cluster.router.enforce_limits()
    assert (second.connection.version, first.connection.version, cluster.router.moves) == (1, 0, 0)
    first.act()
    await updating
    cluster.router.enforce_limits()
    assert cluster.router.moves


async def test_loading_and_standing_still_are_no_silence() -> None:
    cluster = router.Cluster(QueueLimits(max_waiting=10, patience_s=1000.0, engine_silence_s=30.0))
    loading = cluster.connect(router.scripted(router.script))
    frozen = await cluster.serving(router.scripted(router.script))
    cluster.ask([5] * 3, 30)
    await cluster.dispatched()
    pausing = asyncio.ensure_future(cluster.router.pause("freeze", frozen.connection.engine_id))
    await cluster.dispatched()
    frozen.act()
    await pausing
    for engine in (loading, frozen):
        engine.connection.last_heard_at -= 500
    cluster.router.enforce_limits()
    cluster.router.resume(frozen.connection.engine_id)
    cluster.router.enforce_limits()
    assert not loading.is_gone and not frozen.is_gone
    frozen.connection.last_heard_at -= 31
    cluster.router.enforce_limits()
    assert frozen.is_gone


@pytest.mark.parametrize(
    ("obstacle", "sentence"),
    [
        ("nobody", "no engine is connected"),
        ("paused", "the run is paused"),
        ("old", "no engine holds policy version 3 or a later one"),
        ("full", "every engine is full"),
    ],
)
async def test_a_request_out_of_patience_is_told_what_it_waited_for(obstacle: str, sentence: str) -> None:
    cluster = router.Cluster(QueueLimits(max_waiting=2, patience_s=60.0, engine_silence_s=1000.0))
    if obstacle != "nobody":
        await cluster.serving(router.scripted(router.script), max_running=1)
    if obstacle == "full":
        cluster.ask([5], 9)
    if obstacle == "paused":
        cluster.router.paused.add(None)
    generation = cluster.ask([5], 9, floor=3 if obstacle == "old" else 0)
    await cluster.dispatched()
    cluster.router.enforce_limits()
    assert not generation.is_over
    generation.waiting_since -= 61
    cluster.router.enforce_limits()
    with pytest.raises(ApiError, match=f"No engine sampled for this request for 60 s: {sentence}") as refused:
        await generation.progress(0)
    assert (refused.value.status, refused.value.retry_after_s) == (503, 5)
    assert not cluster.router.waiting


async def test_a_request_frozen_for_too_long_is_refused() -> None:
    cluster = router.Cluster(QueueLimits(max_waiting=2, patience_s=60.0, engine_silence_s=1000.0))
    engine = await cluster.serving(router.scripted(lambda prompt, seed: [7] * 99))
    generation = cluster.ask([5], 50)
    await cluster.dispatched()
    pausing = asyncio.ensure_future(cluster.router.pause("freeze"))
    await cluster.dispatched()
    engine.act()
    await pausing
    cluster.router.enforce_limits()
    assert not generation.is_over
    engine.connection.last_heard_at -= 61
    cluster.router.enforce_limits()
    with pytest.raises(ApiError, match="the engine of this request is paused"):
        await generation.progress(0)
    engine.act()
    assert engine.engine is not None and engine.engine.num_requests == 0


async def test_the_line_of_waiting_requests_is_bounded() -> None:
    cluster = router.Cluster(QueueLimits(max_waiting=2, patience_s=60.0, engine_silence_s=1000.0))
    for _ in range(2):
        cluster.router.check_room()
        cluster.ask([5], 9)
    with pytest.raises(
        ApiError, match="2 requests are already waiting, because no engine is connected"
    ) as refused:
        cluster.router.check_room()
    assert (refused.value.status, refused.value.retry_after_s) == (429, 5)


async def test_samples_of_one_prompt_run_side_by_side_and_stay_apart() -> None:
    cluster = router.Cluster()
    engines = [await cluster.serving(router.scripted(router.script), max_running=2) for _ in range(2)]
    samples = [cluster.ask([5] * 4, 30, stop=(router.STOP,)) for _ in range(6)]
    await cluster.dispatched()
    assert [len(engine.connection.in_flight) for engine in engines] == [2, 2]
    engines[0].die()
    await cluster.run()
    assert len({tuple(sample.token_ids) for sample in samples}) > 1
    for sample in samples:
        router.check_tokens(sample)
