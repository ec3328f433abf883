from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sf_core.dataplane.routing.rebalancing import EXCESS, EngineQueue, RunningRequest, plan_moves

REQUESTS = st.builds(
    lambda num_tokens, to_do: (num_tokens, to_do), st.integers(1, 5000), st.integers(1, 5000)
)


class Engine:
    """An engine's requests by name, and its capacity."""

    def __init__(self, name: int, requests: list[tuple[int, int]], spare: int = 8) -> None:
        self.running = {
            (name, i): RunningRequest((name, i), n, to_do, 0) for i, (n, to_do) in enumerate(requests)
        }
        self.max_running = len(requests) + spare

    def queue(self) -> EngineQueue[tuple[int, int]]:
        to_do = sum(running.num_to_do for running in self.running.values())
        return EngineQueue(to_do, self.max_running - len(self.running), self.running.values)

    def take(self, moved: RunningRequest[tuple[int, int]]) -> None:
        to_do = moved.num_tokens + moved.num_to_do
        self.running[moved.request] = moved._replace(num_to_do=to_do, num_moved_at=moved.num_tokens)


def rebalance(engines: list[Engine]) -> int:
    """Move requests until no move is left; returns the number of rounds."""
    num_rounds = 0
    while moves := plan_moves(queues := [engine.queue() for engine in engines]):
        longest = max(engine.queue().outstanding for engine in engines)
        for request, source, target in moves:
            moved = engines[queues.index(source)].running.pop(request)
            engines[queues.index(target)].take(moved)
        assert [engine.queue().outstanding for engine in engines] == [queue.outstanding for queue in queues]
        assert max(engine.queue().outstanding for engine in engines) <= longest
        assert all(len(engine.running) <= engine.max_running for engine in engines)
        num_rounds += 1
    return num_rounds


@given(st.lists(st.lists(REQUESTS, max_size=12), min_size=1, max_size=6), st.integers(0, 5))
def test_moves_shorten_the_longest_queue_and_come_to_an_end(
    requests: list[list[tuple[int, int]]], spare: int
) -> None:
    engines = [Engine(i, mine, spare) for i, mine in enumerate(requests)]
    assert rebalance(engines) <= 1 + sum(map(len, requests))


def test_an_idle_engine_is_given_its_share_of_a_long_tail() -> None:
    busy = Engine(0, [(1000, 900)] * 12)
    idle = Engine(1, [])
    rebalance([busy, idle])
    assert 0 < len(idle.running) < 6
    assert idle.queue().outstanding <= busy.queue().outstanding


def test_what_is_not_repaid_is_not_moved() -> None:
    # alone with two long ones: computing one again takes longer than waiting
    assert rebalance([Engine(0, [(3200, 3000)] * 2), Engine(1, [])]) == 0
    # longer than the others, and within the bound
    assert EXCESS > 1.4
    assert rebalance([Engine(0, [(1, 10)] * 14), Engine(1, [(1, 10)] * 6)]) == 0


def test_a_request_moves_again_only_when_it_is_twice_as_long() -> None:
    engines = [Engine(0, []), Engine(1, [])]
    for num_tokens, moves in ((1999, 0), (2000, 1)):
        engines[0].running = {(0, i): RunningRequest((0, i), num_tokens, 5000, 1000) for i in range(4)}
        assert (rebalance(engines) > 0) == moves
