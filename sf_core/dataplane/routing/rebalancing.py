"""The choice of running requests to move off engines with long queues. It works on numbers, for the router
and the simulator alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import Generic, NamedTuple, TypeVar

EXCESS = 1.5
"""A queue longer than this many times the mean is too long."""

T = TypeVar("T")


class RunningRequest(NamedTuple, Generic[T]):
    """A request in flight on an engine, measured in tokens."""

    request: T
    num_tokens: int
    """Length of the prompt and sampled tokens, which another engine would have to prefill again."""
    num_to_do: int
    """Tokens that the engine still has to prefill or sample."""
    num_moved_at: int
    """`num_tokens` when it was last moved; 0: never."""


@dataclass(eq=False, slots=True)
class EngineQueue(Generic[T]):
    """Work of one engine."""

    outstanding: int
    """Tokens that it still has to prefill or sample."""
    room: int
    """Number of further requests that it could take."""
    running: Callable[[], Iterable[RunningRequest[T]]]


def plan_moves(queues: list[EngineQueue[T]]) -> list[tuple[T, EngineQueue[T], EngineQueue[T]]]:
    """Moves as (request, source, target). The queues are updated as if the moves were done.

    A request moves from a queue longer than EXCESS x mean to the shortest that has room, if that pays for the
    tokens computed again there:

        outstanding(to) + num_tokens + num_to_do < outstanding(from)

    Requests with the most work left per token computed again go first. By the rule, the longer of the two
    queues gets shorter: as long as nothing else happens, moves come to an end. A request moves again only
    when it is twice as long as at its last move: at most log2(context length) times, and all that is computed
    again for it is less than twice its length. So no request oscillates between engines.
    """
    if len(queues) < 2:
        return []
    bound = EXCESS * sum(queue.outstanding for queue in queues) / len(queues)
    # a heap, the shortest queue first; ties go to the first queue, so that equal queues give equal moves
    targets = [(queue.outstanding, i) for i, queue in enumerate(queues) if queue.room]
    heapify(targets)
    moves = []
    for source in sorted(queues, key=lambda queue: -queue.outstanding):
        if source.outstanding <= bound or not targets:
            break
        movable = [r for r in source.running() if r.num_tokens >= 2 * r.num_moved_at]
        for running in sorted(movable, key=lambda r: -r.num_to_do / r.num_tokens):
            if source.outstanding <= bound or not targets:
                break
            _, target_index = targets[0]
            target = queues[target_index]
            cost_there = running.num_tokens + running.num_to_do
            if target.outstanding + cost_there >= source.outstanding:
                continue
            moves.append((running.request, source, target))
            source.outstanding -= running.num_to_do
            target.outstanding += cost_there
            target.room -= 1
            if target.room:
                heapreplace(targets, (target.outstanding, target_index))
            else:
                heappop(targets)
    return moves
