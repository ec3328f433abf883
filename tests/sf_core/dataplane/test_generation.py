"""A turn across a seam between engines."""

from __future__ import annotations

import asyncio

from sf_core.types import Chunk, FinishReason
from tests.sf_core.dataplane.cluster import turn


def chunk(ids: list[int], reason: FinishReason | None = None, version: int = 0) -> Chunk:
    return Chunk("g", ids, [-1.0] * len(ids), version, reason)


def test_a_budget_used_up_at_the_seam_ends_the_turn() -> None:
    generation = turn(3)
    generation.max_tokens = 4
    assert not generation.absorb(chunk([7] * 4, FinishReason.ABORT), "a")
    assert generation.finish_reason is FinishReason.LENGTH


def test_one_token_short_of_the_budget_one_is_asked_for() -> None:
    generation = turn(3)
    generation.max_tokens = 4
    assert generation.absorb(chunk([7] * 3, FinishReason.ABORT), "a")
    rest = generation.remaining_request(0)
    assert (list(rest.prompt_ids), rest.position, rest.max_tokens) == ([5, 5, 5, 7, 7, 7], 3, 1)


def test_an_abort_before_the_first_token_changes_nothing_but_the_count() -> None:
    generation = turn(3)
    before = generation.remaining_request(0)
    assert generation.absorb(chunk([], FinishReason.ABORT), "a")
    assert generation.remaining_request(0) == before
    assert (generation.interruptions, generation.engines, generation.near) == (1, [], None)


def test_a_stream_sees_the_tokens_before_a_seam_while_nobody_continues() -> None:
    asyncio.run(stream_over_a_seam())


async def stream_over_a_seam() -> None:
    generation = turn(3)
    generation.stream = True
    waiting = asyncio.ensure_future(generation.progress(0))
    await asyncio.sleep(0)
    generation.absorb(chunk([7, 8], FinishReason.ABORT), "a")
    await asyncio.wait_for(waiting, 1)
    assert generation.token_ids.tolist() == [7, 8]
