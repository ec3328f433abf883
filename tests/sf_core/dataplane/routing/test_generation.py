"""A turn across a seam between engines."""

from __future__ import annotations

import asyncio
import math

import pytest

from sf_core.types import Chunk, FinishReason
from tests.bench.dataplane.router import chunk, turn
from tests.bench.waits import patience


def test_a_budget_used_up_at_the_seam_ends_the_turn() -> None:
    generation = turn(3, max_tokens=4)
    assert not generation.append(chunk([7] * 4, FinishReason.ABORT), "a")
    assert generation.finish_reason is FinishReason.LENGTH


def test_one_token_short_of_the_budget_one_is_asked_for() -> None:
    generation = turn(3, max_tokens=4)
    assert generation.append(chunk([7] * 3, FinishReason.ABORT), "a")
    rest = generation.remaining_request(0)
    assert (list(rest.prompt_ids), rest.position, rest.max_tokens) == ([5, 5, 5, 7, 7, 7], 3, 1)


def test_every_token_keeps_its_version_and_older_weights_may_not_go_on() -> None:
    generation = turn(3)
    assert generation.append(chunk([7, 8], FinishReason.ABORT, version=2), "a")
    assert generation.floor == 2
    generation.append(chunk([9], version=3), "b")
    assert (generation.versions.tolist(), generation.floor) == ([2, 2, 3], 3)
    assert generation.logprobs.tolist() == [-1.0] * 3


def test_what_was_sampled_behind_a_stop_string_is_dropped_whole() -> None:
    generation = turn(3)
    generation.append(chunk([7, 8, 9], version=2), "a")
    generation.end_at(2)
    assert (generation.token_ids.tolist(), generation.versions.tolist()) == ([7, 8], [2, 2])
    assert (generation.logprobs.tolist(), generation.finish_reason) == ([-1.0] * 2, FinishReason.STOP)


@pytest.mark.parametrize(
    ("logprobs", "fault"),
    [
        ([-1.0, -2.0], None),
        ([-1.0, 1e-4], None),
        ([-1.0], "sent 2 tokens with 1 log-probs"),
        ([], "sent 2 tokens with 0 log-probs"),
        ([-1.0, math.nan], "sent a log-prob that is not the logarithm of a probability"),
        ([math.nan, -1.0], "sent a log-prob that is not the logarithm of a probability"),
    ],
)
def test_log_probs_are_looked_at_before_they_are_taken(logprobs: list[float], fault: str | None) -> None:
    assert turn(3).validate(Chunk("g", [7, 8], logprobs, 0), newest=0, num_ids=10) == fault


def test_an_abort_before_the_first_token_changes_nothing_but_the_count() -> None:
    generation = turn(3)
    before = generation.remaining_request(0)
    assert generation.append(chunk([], FinishReason.ABORT), "a")
    assert generation.remaining_request(0) == before
    assert (generation.interruptions, generation.engines, generation.cache_hint) == (1, [], None)


async def test_a_stream_sees_the_tokens_before_a_seam_while_nobody_continues() -> None:
    generation = turn(3, stream=True)
    waiting = asyncio.ensure_future(generation.progress(0))
    await asyncio.sleep(0)
    generation.append(chunk([7, 8], FinishReason.ABORT), "a")
    await asyncio.wait_for(waiting, patience())
    assert generation.token_ids.tolist() == [7, 8]
