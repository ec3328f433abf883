from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.emulation.continuous_batch import ConstantDelay, ContinuousBatch


class Linear:
    """A prompt token costs 1 ms; a step 10 ms and 1 us per token of context."""

    def prefill_s(self, num_tokens: int) -> float:
        return 1e-3 * num_tokens

    def decode_s(self, num_running: int, context: float) -> float:
        return 1e-2 + 1e-6 * context


def finish(batch: ContinuousBatch) -> list[tuple[str, float]]:
    """(name, seconds from now) of all requests that become due."""
    seconds = 0.0
    ends = []
    while (wait := batch.next_due_s()) is not None:
        seconds += wait
        ends += [(slot.name, seconds) for slot in batch.advance(wait)]
    return ends


def test_a_prompt_is_prefilled_and_then_its_tokens_cost_what_its_context_says() -> None:
    batch = ContinuousBatch(Linear())
    batch.join("a", num_prompt=1000, num_wanted=10)
    expected = 1.0 + sum(1e-2 + 1e-6 * (1000 + i) for i in range(10))
    assert finish(batch) == [("a", pytest.approx(expected, rel=1e-4))]


def test_what_is_cached_of_a_prompt_is_context_and_no_prefill() -> None:
    whole = ContinuousBatch(Linear())
    rest = ContinuousBatch(Linear())
    whole.join("a", num_prompt=1000, num_wanted=10)
    rest.join("a", num_prompt=1000, num_wanted=10, num_cached=900)
    (_, cold) = finish(whole)[0]
    (_, warm) = finish(rest)[0]
    assert cold - warm == pytest.approx(0.9, rel=1e-4)


def test_a_prefill_makes_the_others_wait() -> None:
    batch = ContinuousBatch(ConstantDelay(0.01))
    alone = ContinuousBatch(Linear())
    alone.join("a", 10, 100)
    (_, undisturbed) = finish(alone)[0]
    batch = ContinuousBatch(Linear())
    batch.join("a", 10, 100)
    batch.advance(0.5)
    batch.join("b", 300, 1)
    ends = dict(finish(batch))
    assert ends["a"] == pytest.approx(undisturbed - 0.5 + 0.3, abs=0.02)
    assert ends["b"] < ends["a"]


def test_what_left_holds_no_context_and_no_place_in_the_line_of_prefills() -> None:
    batch = ContinuousBatch(Linear())
    slots = [batch.join(str(i), 1000, 50) for i in range(3)]
    batch.advance(2.5)
    batch.leave(slots[0])
    batch.leave(slots[2])
    only = ContinuousBatch(Linear())
    only.join("1", 1000, 50)
    left = 50 - batch.num_sampled(slots[1])
    (_, end) = finish(batch)[0]
    # half of the third prompt was prefilled before it left
    assert end == pytest.approx(left * (1e-2 + 1e-6 * 1025), rel=0.02)


def test_recomputed_context_costs_one_more_prefill() -> None:
    batch = ContinuousBatch(Linear())
    plain = ContinuousBatch(Linear())
    for each in (batch, plain):
        each.join("a", 100, 100)
        each.advance(0.6)
    batch.recompute()
    held = 100 + batch.num_sampled(batch.join("later", 0, 1))
    assert finish(batch)[-1][1] == pytest.approx(finish(plain)[0][1] + 1e-3 * held, abs=0.06)


@given(
    st.lists(st.tuples(st.integers(0, 200), st.integers(1, 200)), min_size=1, max_size=8),
    st.lists(st.floats(0.001, 0.3), min_size=1, max_size=20),
)
def test_when_time_is_looked_at_changes_nothing(requests: list[tuple[int, int]], steps: list[float]) -> None:
    looked_at = ContinuousBatch(Linear())
    left_alone = ContinuousBatch(Linear())
    for batch in (looked_at, left_alone):
        for i, (num_prompt, num_wanted) in enumerate(requests):
            batch.join(str(i), num_prompt, num_wanted)
    ends: dict[str, float] = {}
    seconds = 0.0
    for step in steps:
        ends |= {slot.name: seconds + step for slot in looked_at.advance(step)}
        seconds += step
    ends |= {name: seconds + later for name, later in finish(looked_at)}
    expected = dict(finish(left_alone))
    assert ends.keys() == expected.keys()
    assert all(expected[name] - 1e-3 <= ends[name] <= expected[name] + 0.3 + 1e-3 for name in ends)
