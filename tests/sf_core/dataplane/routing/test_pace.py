"""Readers of streams are woken in rounds, and only those that must wait for a round."""

from __future__ import annotations

import asyncio

import pytest

from sf_core.dataplane.routing.generation import Generation, StreamPace
from sf_core.types import FinishReason
from tests.bench.dataplane.router import chunk, turn
from tests.bench.waits import patience

NEVER_S = 1e9
"""Time of an event after which no further round begins."""


def stream(pace: StreamPace) -> Generation:
    generation = turn(3, stream=True)
    generation.pace = pace
    return generation


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def reads(generation: Generation, num_seen: int) -> asyncio.Future[None]:
    """Reader that waits for more than the first `num_seen` tokens."""
    waiting = asyncio.ensure_future(generation.progress(num_seen))
    await settled()
    return waiting


async def after_a_round(event_s: float = NEVER_S) -> StreamPace:
    """A pace after a round of one event; the next round begins `event_s` after it."""
    pace = StreamPace(event_s)
    pace.wake_in_next_round(lambda: None)
    await settled()
    return pace


async def test_what_is_due_together_shares_a_round() -> None:
    pace = StreamPace(NEVER_S)
    woken = []
    for number in range(3):
        pace.wake_in_next_round(lambda number=number: woken.append(number))
    assert woken == []
    await settled()
    assert woken == [0, 1, 2]


async def test_the_next_round_waits_until_the_events_of_the_last_one_have_had_their_time() -> None:
    pace = await after_a_round()
    woken = []
    pace.wake_in_next_round(lambda: woken.append(1))
    await settled()
    assert woken == []


async def test_after_that_time_the_next_round_begins_at_once() -> None:
    pace = await after_a_round(event_s=0.0)
    woken = []
    pace.wake_in_next_round(lambda: woken.append(1))
    await settled()
    assert woken == [1]


async def test_a_round_that_waits_comes() -> None:
    pace = await after_a_round(event_s=0.001)
    woken = asyncio.Event()
    pace.wake_in_next_round(woken.set)
    await asyncio.wait_for(woken.wait(), patience())


async def test_the_first_tokens_of_an_answer_wait_for_no_round() -> None:
    generation = stream(await after_a_round())
    reading = await reads(generation, 0)
    generation.append(chunk([7]), "a")
    await settled()
    assert reading.done()


async def test_first_tokens_that_were_there_before_their_reader_wait_for_no_round() -> None:
    generation = stream(await after_a_round())
    generation.append(chunk([7]), "a")
    assert (await reads(generation, 0)).done()


async def test_later_tokens_share_the_next_round() -> None:
    generation = stream(StreamPace(NEVER_S))
    generation.append(chunk([7]), "a")
    reading = await reads(generation, 1)
    generation.append(chunk([8]), "a")
    generation.append(chunk([9]), "a")
    assert not reading.done()
    await settled()
    assert reading.done()


async def test_tokens_that_came_while_their_reader_was_busy_wait_for_the_round_too() -> None:
    generation = stream(await after_a_round())
    generation.append(chunk([7, 8]), "a")
    reading = await reads(generation, 1)
    assert not reading.done()
    reading.cancel()


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.ABORT])
async def test_the_end_and_an_interruption_wait_for_no_round(reason: FinishReason) -> None:
    generation = stream(await after_a_round())
    generation.append(chunk([7]), "a")
    reading = await reads(generation, 1)
    generation.append(chunk([8]), "a")
    await settled()
    assert not reading.done()
    generation.append(chunk([9], reason), "a")
    await settled()
    assert reading.done()
    assert generation.token_ids.tolist() == [7, 8, 9]


async def test_a_reader_that_has_seen_everything_is_not_woken_by_its_round() -> None:
    generation = stream(await after_a_round(event_s=0.01))
    generation.append(chunk([7]), "a")
    reading = await reads(generation, 1)
    generation.append(chunk([8]), "a")
    generation.append(chunk([], FinishReason.ABORT), "a")
    await reading
    seen = await reads(generation, 2)
    over = asyncio.Event()
    assert generation.pace is not None
    generation.pace.wake_in_next_round(over.set)
    await asyncio.wait_for(over.wait(), patience())
    await settled()
    assert not seen.done()
    seen.cancel()
