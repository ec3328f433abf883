"""The question to the run directory whether a later attempt has begun."""

from __future__ import annotations

import asyncio
import threading

import pytest

from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.journal.ownership import Fence
from storage.errors import StorageError
from tests.bench.waits import patience, until


async def test_who_comes_during_a_question_shares_the_next_one() -> None:
    may_answer = threading.Semaphore(0)
    begun = list[int]()
    has_later = False

    def ask() -> bool:
        begun.append(len(begun))
        answer = has_later
        may_answer.acquire(timeout=patience())
        return answer

    fence = Fence(ask)
    early = asyncio.ensure_future(fence.is_superseded())
    await until(lambda: begun)
    has_later = True
    late = [asyncio.ensure_future(fence.is_superseded()) for _ in range(100)]
    await asyncio.sleep(0)
    assert len(begun) == 1, "one question at a time"
    may_answer.release(2)
    assert not await early
    # the answer to the first question was older than what they ask for
    assert all(await asyncio.gather(*late))
    assert len(begun) == 2


async def test_a_storage_that_does_not_answer_is_asked_again_by_the_next_caller() -> None:
    answers = [StorageError("s3://b/run: the storage cannot be reached"), False]

    def ask() -> bool:
        answer = answers.pop(0)
        if isinstance(answer, StorageError):
            raise answer
        return answer

    fence = Fence(ask)
    with pytest.raises(ApiError, match="later attempt of the run has begun: s3://b/run: ") as refused:
        await fence.is_superseded()
    assert (refused.value.status, refused.value.retry_after_s) == (503, 5)
    assert not await fence.is_superseded()


async def test_who_stops_waiting_does_not_stop_the_others() -> None:
    may_answer = threading.Event()
    fence = Fence(lambda: may_answer.wait(patience()))
    waiting = [asyncio.ensure_future(fence.is_superseded()) for _ in range(2)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    may_answer.set()
    assert await waiting[1]
