from __future__ import annotations

import asyncio
from dataclasses import dataclass

from sf_core.dataplane.conditions import Condition
from sf_core.dataplane.sessions.memory_budget import MemoryBudget
from tests.bench.waits import patience

MB = 2**20


@dataclass(eq=False)
class Item:
    num_bytes: int


def test_items_are_counted_as_they_were_when_they_were_last_weighed() -> None:
    memory = MemoryBudget(1)
    session = Item(MB)
    result = Item(10)
    memory.add(session)
    memory.add(session)
    assert (memory.num_bytes, memory.is_full) == (MB, False)
    memory.add(result)
    assert (memory.num_bytes, memory.is_full) == (MB + 10, True)
    session.num_bytes = 5
    assert memory.num_bytes == MB + 10
    memory.update(session)
    assert (memory.num_bytes, memory.is_full) == (15, False)
    memory.remove(session)
    memory.remove(result)
    assert memory.num_bytes == 0


def test_an_item_that_is_not_counted_may_be_weighed_and_removed() -> None:
    memory = MemoryBudget(1)
    memory.update(Item(7))
    memory.remove(Item(7))
    assert memory.num_bytes == 0


async def test_whoever_waits_for_memory_is_woken_once_it_is_no_longer_full() -> None:
    memory = MemoryBudget(1)
    condition = Condition()
    memory.watchers.add(condition)
    large = Item(MB)
    small = Item(10)
    memory.add(large)
    memory.add(small)
    waiting = asyncio.ensure_future(condition.wait())
    await asyncio.sleep(0)
    small.num_bytes = 5
    memory.update(small)
    await asyncio.sleep(0)
    assert not waiting.done(), "it is still full"
    memory.remove(small)
    await asyncio.wait_for(waiting, patience())


def test_it_says_how_much_of_what_is_held() -> None:
    memory = MemoryBudget(2000)
    memory.add(Item(2100 * MB))
    assert str(memory) == "memory: 2,100.0 of 2,000.0 MB held"
