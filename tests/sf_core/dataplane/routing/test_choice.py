from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sf_core.dataplane.routing.choice import MeanAnswerLength, choose, num_cached
from sf_core.dataplane.routing.connection import EngineConnection
from sf_core.dataplane.routing.generation import CacheHint
from sf_core.dataplane.routing.wait_queue import WaitQueue
from sf_core.types import Chunk
from tests.bench.dataplane.router import turn


def engine(name: str, outstanding: int = 0, version: int = 0) -> EngineConnection:
    made = EngineConnection(name, name, name, 1, 8, lambda frame: None, version=version)
    made.outstanding = outstanding
    return made


def test_the_shortest_queue_in_tokens_wins() -> None:
    assert choose([engine("a", 900), engine("b", 300), engine("c", 301)], turn(10)).engine_id == "b"


@given(queue=st.integers(0, 5000), other=st.integers(0, 5000), cached=st.integers(1, 4000))
def test_a_branch_stays_with_its_engine_while_what_is_cached_outweighs_the_queue(
    queue: int, other: int, cached: int
) -> None:
    generation = turn(cached + 50, CacheHint("a", 0, cached))
    chosen = choose([engine("b", other), engine("a", queue)], generation).engine_id
    assert chosen == ("a" if queue - other < cached else "b")


def test_nothing_is_cached_of_other_weights_or_on_another_engine() -> None:
    near = CacheHint("a", 3, 80)
    assert num_cached(engine("a", version=3), turn(100, near)) == 80
    assert num_cached(engine("a", version=4), turn(100, near)) == 0
    assert num_cached(engine("b", version=3), turn(100, near)) == 0
    assert num_cached(engine("a", version=3), turn(80, near)) == 79, "the last token is always computed"


@given(st.lists(st.integers(0, 500)), st.integers(1, 50), st.integers(0, 40))
def test_the_estimate_of_what_is_to_come_keeps_to_the_budget(
    lengths: list[int], budget: int, produced: int
) -> None:
    typical = MeanAnswerLength()
    for length in lengths:
        typical.update(length)
    generation = turn(5, max_tokens=budget + produced)
    generation.append(Chunk("g", [7] * produced, [0.0] * produced, 0), "a")
    assert 1 <= typical.expected_remaining(generation) <= budget


@given(st.lists(st.tuples(st.sampled_from(["join", "leave", "take"]), st.integers(0, 5)), max_size=40))
def test_a_waiting_line_is_always_in_order_of_arrival(moves: list[tuple[str, int]]) -> None:
    line = WaitQueue()
    generations = [turn(1) for _ in range(6)]
    inside: set[int] = set()
    for move, index in moves:
        if move == "join" and index not in inside:
            line.push(generations[index])
            inside.add(index)
        elif move == "leave":
            line.remove(generations[index])
            inside.discard(index)
        elif move == "take" and len(line):
            inside.remove(generations.index(next(iter(line))))
            line.retain_passed_over([], 1)
        assert [id(g) for g in line] == sorted(
            (id(generations[i]) for i in inside),
            key=lambda i: next(g.arrival or 0 for g in generations if id(g) == i),
        )
