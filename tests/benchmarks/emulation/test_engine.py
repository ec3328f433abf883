from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.emulation.engine import BLOCK, FIRST_ID, MAX_SLEEP_S, NUM_IDS, STALL_S, EmulatedEngine
from sf_core.engines.protocol import StepEngine
from sf_core.testing.engines import EngineTests, awake, drain, ids_of
from sf_core.types import Chunk, FinishReason, GenerationRequest, Sampling, WeightsRef

DELAY_S = 0.01


class Clock:
    """A clock that advances only in `sleep`."""

    def __init__(self) -> None:
        self.time = 100.0
        self.sleeps: list[float] = []

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.time += seconds


def make(clock: Clock, delay_s: float = DELAY_S) -> EmulatedEngine:
    """An engine with weights."""
    engine = EmulatedEngine(delay_s, now=clock.now, sleep=clock.sleep)
    awake(engine, WeightsRef(0, ""))
    return engine


class TestContract(EngineTests):
    def make(self) -> EmulatedEngine:
        clock = Clock()
        return EmulatedEngine(DELAY_S, weight_load_s=2.5 * DELAY_S, now=clock.now, sleep=clock.sleep)


def request(
    name: str = "r", max_tokens: int = 5, position: int = 0, stream: bool = False
) -> GenerationRequest:
    return GenerationRequest(name, [1, 2], position, max_tokens, (), Sampling(), stream)


def run_for(engine: StepEngine, clock: Clock, seconds: float) -> list[Chunk]:
    chunks = []
    end = clock.time + seconds
    while clock.time < end and engine.num_requests:
        chunks += engine.step()
    return chunks


def counted(num_tokens: int) -> list[int]:
    return [FIRST_ID + i % NUM_IDS for i in range(num_tokens)]


def test_any_number_of_requests_take_one_delay_per_token() -> None:
    clock = Clock()
    engine = make(clock)
    for i in range(1000):
        engine.submit(request(str(i), max_tokens=20))
    started = clock.time
    chunks = drain(engine)
    assert abs(clock.time - started - 20 * DELAY_S) < MAX_SLEEP_S
    assert len(ids_of(chunks)) == 20_000


def test_tokens_count_up_with_log_probs_and_end_at_the_budget() -> None:
    engine = make(Clock())
    engine.submit(request(max_tokens=100))
    chunks = drain(engine)
    assert ids_of(chunks) == counted(100)
    assert all(-1 <= logprob < 0 for chunk in chunks for logprob in chunk.logprobs)
    assert [len(chunk.logprobs) for chunk in chunks] == [len(chunk.token_ids) for chunk in chunks]
    assert [chunk.finish_reason for chunk in chunks] == [None] * 6 + [FinishReason.LENGTH]


def test_a_streamed_request_gets_every_token_at_once() -> None:
    engine = make(Clock())
    engine.submit(request(max_tokens=5, stream=True))
    assert [len(chunk.token_ids) for chunk in drain(engine)] == [1] * 5


def test_without_a_delay_an_answer_takes_one_step() -> None:
    clock = Clock()
    engine = make(clock, delay_s=0.0)
    engine.submit(request(max_tokens=300))
    (chunk,) = engine.step()
    assert chunk.token_ids == counted(300)
    assert clock.sleeps == []


def test_it_sleeps_instead_of_spinning_and_never_long() -> None:
    clock = Clock()
    engine = make(clock)
    engine.submit(request(max_tokens=1))
    drain(engine)
    assert len(clock.sleeps) <= DELAY_S / MAX_SLEEP_S + 1
    assert max(clock.sleeps) <= MAX_SLEEP_S


def test_nothing_is_sampled_while_it_is_not_stepped() -> None:
    clock = Clock()
    engine = make(clock)
    engine.submit(request(max_tokens=10))
    run_for(engine, clock, 3.5 * DELAY_S)
    clock.time += 10 * STALL_S
    (chunk,) = engine.abort()
    assert chunk.token_ids == counted(3)


def test_tokens_sampled_before_an_update_carry_the_old_version() -> None:
    clock = Clock()
    engine = make(clock)
    engine.submit(request(max_tokens=10))
    run_for(engine, clock, 4.5 * DELAY_S)
    chunks = awake(engine, WeightsRef(1, "")) + drain(engine)
    assert [(chunk.version, len(chunk.token_ids)) for chunk in chunks] == [(0, 4), (1, 6)]
    assert ids_of(chunks) == counted(10)


def test_a_turn_that_ended_before_the_version_changed_is_reported_with_the_old_one() -> None:
    clock = Clock()
    engine = make(clock)
    engine.submit(request(max_tokens=3))
    clock.time += 3 * DELAY_S
    (chunk,) = awake(engine, WeightsRef(1, ""))
    assert (chunk.token_ids, chunk.version, chunk.finish_reason) == (counted(3), 0, FinishReason.LENGTH)
    assert engine.num_requests == 0


@given(st.integers(1, 200), st.floats(0, 2.5), st.booleans())
def test_an_aborted_turn_continues_elsewhere_without_a_lost_or_repeated_token(
    max_tokens: int, seconds: float, stream: bool
) -> None:
    clock = Clock()
    first = make(clock)
    second = make(clock)
    first.submit(request(max_tokens=max_tokens, stream=stream))
    chunks = run_for(first, clock, seconds) + first.abort()
    assert first.num_requests == 0
    produced = len(ids_of(chunks))
    if produced < max_tokens:
        second.submit(request(max_tokens=max_tokens - produced, position=produced, stream=stream))
    assert ids_of(chunks + drain(second)) == counted(max_tokens)


class Prefills:
    """Pace of one second per prompt token and nearly nothing per sampled token."""

    def prefill_s(self, num_tokens: int) -> float:
        return float(num_tokens)

    def decode_s(self, num_running: int, context: float) -> float:
        return 1e-6


def seconds_for(engine: EmulatedEngine, clock: Clock, name: str, prompt: list[int]) -> float:
    """Seconds until the engine has sampled ten tokens after this prompt."""
    started = clock.time
    engine.submit(GenerationRequest(name, prompt, 0, 10, (), Sampling()))
    assert ids_of(drain(engine)) == counted(10)
    return clock.time - started


def keeping(clock: Clock, kv_tokens: int) -> EmulatedEngine:
    engine = EmulatedEngine(
        Prefills(),
        kv_tokens=kv_tokens,
        now=clock.now,
        sleep=clock.sleep,
        max_sleep_s=1e9,
        stall_s=1e9,
    )
    awake(engine, WeightsRef(0, ""))
    return engine


FIRST = list(range(100, 150))
NEXT = [*FIRST, *counted(10), 7, 8, 9]
"""The prompt after FIRST, its answer and a tool's result."""


def test_the_next_turn_of_a_session_prefills_only_what_is_new() -> None:
    clock = Clock()
    engine = keeping(clock, kv_tokens=1000)
    assert seconds_for(engine, clock, "a", FIRST) == pytest.approx(50, abs=0.1)
    # 60 tokens were left, of which 48 are whole blocks
    assert seconds_for(engine, clock, "b", NEXT) == pytest.approx(63 - 3 * BLOCK, abs=0.1)


def test_another_prompt_new_weights_and_a_full_memory_leave_nothing_to_go_on_from() -> None:
    clock = Clock()
    engine = keeping(clock, kv_tokens=1000)
    seconds_for(engine, clock, "a", FIRST)
    assert seconds_for(engine, clock, "b", [1, *NEXT]) == pytest.approx(64, abs=0.1)
    awake(engine, WeightsRef(1, ""))
    assert seconds_for(engine, clock, "c", NEXT) == pytest.approx(63, abs=0.1)
    small = keeping(clock, kv_tokens=40)
    seconds_for(small, clock, "a", FIRST)
    assert seconds_for(small, clock, "b", NEXT) == pytest.approx(63, abs=0.1)


def test_aborted_turns_report_nothing_later_and_others_go_on() -> None:
    engine = make(Clock())
    engine.submit(request("a"))
    engine.submit(request("b"))
    assert [chunk.request_id for chunk in engine.abort(["a", "unknown"])] == ["a"]
    engine.submit(request("a", max_tokens=7))
    ended = {chunk.request_id: chunk for chunk in drain(engine)}
    assert {name: len(chunk.token_ids) for name, chunk in ended.items()} == {"a": 7, "b": 5}


def test_it_samples_on_while_weights_are_on_their_way_and_sleeps_while_it_wakes() -> None:
    clock = Clock()
    engine = EmulatedEngine(
        DELAY_S, weight_load_s=4.5 * DELAY_S, wake_s=lambda: 0.3, now=clock.now, sleep=clock.sleep
    )
    started = clock.time
    awake(engine, WeightsRef(0, ""))
    assert clock.time - started == pytest.approx(0.3, abs=2 * MAX_SLEEP_S)
    engine.submit(request(max_tokens=10, stream=True))
    chunks = awake(engine, WeightsRef(1, "")) + drain(engine)
    assert [chunk.version for chunk in chunks] == [0] * 4 + [1] * 6
    assert clock.time - started == pytest.approx(0.3 + 10 * DELAY_S, abs=3 * MAX_SLEEP_S)
