"""Which running requests leave an engine whose queue is too long. Numbers in, decision out: the router and
the simulator ask the same function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import Generic, NamedTuple, TypeVar

EXCESS = 1.5
"""A queue so many times as long as the mean one is too long."""

T = TypeVar("T")


class Running(NamedTuple, Generic[T]):
    """A request that an engine works on, in tokens."""

    request: T
    num_tokens: int
    """Of its prompt and sampled so far: what another engine would have to compute again."""
    num_to_do: int
    """What its engine still has to do for it."""
    num_moved_at: int
    """`num_tokens` when it was last moved; 0: never."""


@dataclass(eq=False, slots=True)
class Queue(Generic[T]):
    """An engine's."""

    outstanding: int
    """Tokens that it still has to do."""
    room: int
    """Requests that it could take."""
    running: Callable[[], Iterable[Running[T]]]


def find_moves(queues: list[Queue[T]]) -> list[tuple[T, Queue[T], Queue[T]]]:
    """What to move, from where and where to; the queues are left as they would be then.

    A request moves from a queue longer than EXCESS x mean to the shortest that has room, if it repays what is
    computed again there:

        outstanding(to) + num_tokens + num_to_do < outstanding(from)

    Of those that do, the one goes first that has most to do per token computed again. By the rule, the longer
    of the two queues gets shorter: as long as nothing else happens, moves come to an end. And a request moves
    again only when it is twice as long as it was then: at most log2(context length) times, and all that is
    computed again for it is less than twice its length. So nothing is moved to and fro.
    """
    if len(queues) < 2:
        return []
    bound = EXCESS * sum(queue.outstanding for queue in queues) / len(queues)
    # of equals the first, so that the same queues give the same moves
    shortest = [(queue.outstanding, i) for i, queue in enumerate(queues) if queue.room]
    heapify(shortest)
    moves = []
    for source in sorted(queues, key=lambda queue: -queue.outstanding):
        if source.outstanding <= bound or not shortest:
            break
        movable = [r for r in source.running() if r.num_tokens >= 2 * r.num_moved_at]
        for running in sorted(movable, key=lambda r: -r.num_to_do / r.num_tokens):
            if source.outstanding <= bound or not shortest:
                break
            target = queues[shortest[0][1]]
            needed = running.num_tokens + running.num_to_do
            if target.outstanding + needed >= source.outstanding:
                continue
            moves.append((running.request, source, target))
            source.outstanding -= running.num_to_do
            target.outstanding += needed
            target.room -= 1
            place = shortest[0][1]
            if target.room:
                heapreplace(shortest, (target.outstanding, place))
            else:
                heappop(shortest)
    return moves
