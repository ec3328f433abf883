"""The contract of engines, as tests: a test class inherits from EngineTests, or from ModelEngineTests
(model_engines.py) if its tokens come from a network, and says how its engine is made.

Needs no pytest. A pytest fixture of the subclass may set what `make` needs.
"""

from __future__ import annotations

import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from sf_core.engines.protocol import Engine, StepEngine
from sf_core.testing.driven_engine import DrivenEngine
from sf_core.types import Chunk, FinishReason, GenerationRequest, Sampling, WeightsRef

PATIENCE_S = 600.0
"""Longest wait for weights or for the end of requests."""


def awake(engine: StepEngine, weights: WeightsRef) -> list[Chunk]:
    """Step until the engine holds these weights; returns the chunks reported meanwhile. Raises what its steps
    raise, and AssertionError if the weights do not come."""
    engine.update_weights(weights)
    chunks: list[Chunk] = []

    def step() -> None:
        chunks.extend(engine.step())
        # the thread that makes them needs the interpreter too
        time.sleep(0.0005)

    until(step, lambda: engine.version == weights.version)
    return chunks


def drain(engine: StepEngine) -> list[Chunk]:
    """Chunks up to the end of all requests."""
    # also those of requests that ended while something else was done
    chunks = engine.step()
    until(lambda: chunks.extend(engine.step()), lambda: engine.num_requests == 0)
    return chunks


def sample(engine: StepEngine, *requests: GenerationRequest) -> list[Chunk]:
    """Chunks of these requests, which are sampled together, up to the end of all requests."""
    for request in requests:
        engine.submit(request)
    return drain(engine)


def sample_by_both(attempt: Callable[[], list[Chunk]]) -> list[Chunk]:
    """Chunks of the first attempt in which the weights of versions 0 and 1 sampled: engines that sample on
    between steps may have ended a request before it is interrupted."""
    chunks: list[Chunk] = []

    def try_again() -> None:
        chunks[:] = attempt()

    until(try_again, lambda: {chunk.version for chunk in chunks if chunk.token_ids} == {0, 1})
    return chunks


def ids_of(chunks: Sequence[Chunk], name: str | None = None) -> list[int]:
    """Token ids of one request, or of all."""
    return [token for chunk in chunks if name in (None, chunk.request_id) for token in chunk.token_ids]


class EngineTests:
    prompt: Sequence[int] = (5, 6, 7, 8)
    num_tokens = 24
    """Budget of a turn; the engine must be able to sample so many tokens after the prompt."""
    num_sequences = 20
    """Random sequences of calls that are tried."""

    def make(self) -> Engine:
        """An engine at rest. Equal engines sample equal tokens for equal requests. It may be the one that the
        test had before, if that is at rest again."""
        raise NotImplementedError

    def weights(self, version: int) -> WeightsRef:
        """Weights that the engine can take, different ones for each version."""
        return WeightsRef(version, "")

    def sampling(self, seed: int) -> Sampling:
        """Sampling whose tokens do not depend on other requests, nor on interruptions."""
        return Sampling(seed=seed)

    def test_an_engine_is_made_at_rest_and_an_idle_one_samples_nothing(self) -> None:
        engine = DrivenEngine(self.make())
        assert (engine.version, engine.num_requests) == (None, 0)
        assert engine.step() == [] and engine.abort() == []
        assert awake(engine, self.weights(0)) == []
        assert (engine.version, engine.num_requests) == (0, 0)
        assert engine.step() == [] and engine.abort() == []
        engine.rest()

    def test_a_request_ends_once_with_a_log_prob_for_every_token(self) -> None:
        with self.serve() as engine:
            for name, stream in (("whole", False), ("streamed", True)):
                engine.submit(self.request(name, stream=stream))
            assert engine.num_requests == 2
            chunks = drain(engine)
            for name in ("whole", "streamed"):
                own = [chunk for chunk in chunks if chunk.request_id == name]
                assert [chunk.finish_reason is not None for chunk in own] == [False] * (len(own) - 1) + [True]
                assert 0 < len(ids_of(own)) <= self.num_tokens
                assert own[-1].finish_reason is not FinishReason.ABORT
                if own[-1].finish_reason is FinishReason.LENGTH:
                    assert len(ids_of(own)) == self.num_tokens
            for chunk in chunks:
                assert len(chunk.token_ids) == len(chunk.logprobs)
                assert all(math.isfinite(logprob) and logprob <= 0 for logprob in chunk.logprobs)
                assert chunk.version == 0

    def test_a_streamed_request_is_reported_token_by_token(self) -> None:
        with self.serve() as engine:
            chunks = sample(engine, self.request("r", stream=True))
            assert len([chunk for chunk in chunks if chunk.token_ids]) == len(ids_of(chunks))

    def test_the_tokens_of_a_request_do_not_depend_on_the_others(self) -> None:
        expected = self.sample_alone()
        with self.serve() as engine:
            engine.submit(self.request("before", seed=4))
            early = engine.step()
            chunks = sample(engine, self.request("r"), self.request("after", seed=5))
            assert ids_of(early + chunks, "r") == expected

    def test_a_name_is_taken_until_its_request_has_ended(self) -> None:
        expected = self.sample_alone()
        with self.serve() as engine:
            engine.submit(self.request("r"))
            error = catch(lambda: engine.submit(self.request("r")), ValueError)
            assert "'r'" in str(error)
            drain(engine)
            assert ids_of(sample(engine, self.request("r"))) == expected

    def test_an_aborted_request_goes_on_elsewhere_without_a_lost_or_repeated_token(self) -> None:
        expected = self.sample_alone()
        for num_steps in (0, 1, 3, 17):
            with self.serve() as engine:
                engine.submit(self.request("r", stream=num_steps == 3))
                chunks = [chunk for _ in range(num_steps) for chunk in engine.step()]
                if engine.num_requests:
                    chunks += engine.abort(["r", "unknown"])
                    # some engines sample on between steps, up to the end
                    assert chunks[-1].finish_reason is FinishReason.ABORT or ids_of(chunks) == expected
                assert engine.num_requests == 0
            done = ids_of(chunks)
            if len(done) < len(expected):
                with self.serve() as other:
                    other.submit(self.request("r", done=done))
                    done += ids_of(drain(other))
            assert done == expected

    def test_abort_ends_all_requests_or_those_that_are_named(self) -> None:
        with self.serve() as engine:
            chunks: list[Chunk] = []

            def abort_one() -> None:
                engine.abort()
                for name in "abc":
                    engine.submit(self.request(name))
                chunks[:] = engine.abort(["b"])

            # some engines sample on meanwhile, up to the end
            until(
                abort_one, lambda: engine.num_requests == 2 and chunks[-1].finish_reason is FinishReason.ABORT
            )
            assert chunks[-1].request_id == "b"
            assert sorted({chunk.request_id for chunk in engine.abort()}) == ["a", "c"]
            assert engine.num_requests == 0 and engine.step() == []

    def test_tokens_carry_the_version_of_the_weights_that_sampled_them(self) -> None:
        with self.serve() as engine:
            engine.submit(self.request("r"))
            chunks = [chunk for _ in range(3) for chunk in engine.step()]
            engine.pause()
            chunks += awake(engine, self.weights(7))
            engine.resume()
            chunks += drain(engine)
            versions = [chunk.version for chunk in chunks]
            assert versions == sorted(versions) and set(versions) <= {0, 7}
            assert chunks[-1].finish_reason is not None
            assert {chunk.version for chunk in sample(engine, self.request("next"))} == {7}

    def test_newer_weights_take_the_place_of_those_on_their_way(self) -> None:
        with self.serve() as engine:
            engine.submit(self.request("r"))
            engine.update_weights(self.weights(1))
            chunks = awake(engine, self.weights(2)) + drain(engine)
            assert {chunk.version for chunk in chunks} <= {0, 2}

    def test_a_paused_engine_samples_nothing_and_takes_weights(self) -> None:
        expected = self.sample_alone()
        with self.serve() as engine:
            chunks: list[Chunk] = []
            names: list[str] = []

            def pause() -> None:
                engine.resume()
                drain(engine)
                # a name of its own: the last chunk of a request that has ended may come late
                names.append(f"r{len(names)}")
                engine.submit(self.request(names[-1], stream=True))
                chunks[:] = engine.step()
                engine.pause()
                # what was sampled before may still be reported
                chunks.extend(chunk for _ in range(20) for chunk in engine.step())

            def of_last(told: list[Chunk]) -> list[int]:
                return ids_of([chunk for chunk in told if chunk.request_id == names[-1]])

            # some engines sample on between steps, up to the end
            until(pause, lambda: engine.num_requests == 1)
            assert of_last([chunk for _ in range(20) for chunk in engine.step()]) == []
            engine.resume()
            assert of_last(chunks + drain(engine)) == expected
            engine.pause()
            assert awake(engine, self.weights(1)) == []
            engine.submit(self.request("r"))
            assert [engine.step() for _ in range(5)] == [[]] * 5
            engine.resume()
            assert {chunk.version for chunk in drain(engine)} == {1}

    def test_after_a_rest_it_serves_again(self) -> None:
        expected = self.sample_alone()
        with self.serve() as engine:
            engine.submit(self.request("forgotten"))
            engine.step()
            engine.rest()
            assert (engine.version, engine.num_requests, engine.step()) == (None, 0, [])
            engine.update_weights(self.weights(1))
            engine.rest()
            assert engine.step() == [] and engine.version is None
            awake(engine, self.weights(0))
            assert ids_of(sample(engine, self.request("r"))) == expected

    def test_any_sequence_of_calls_ends_every_request_once_without_a_lost_or_repeated_token(self) -> None:
        expected = self.sample_alone()
        for seed in range(self.num_sequences):
            self._try_calls(random.Random(seed), expected)

    def _try_calls(self, rng: random.Random, expected: list[int]) -> None:
        version = 0
        number = 0
        paused = False
        with self.serve() as engine:
            got: dict[str, list[Chunk]] = defaultdict(list)

            def note(chunks: list[Chunk]) -> None:
                for chunk in chunks:
                    got[chunk.request_id].append(chunk)

            for _ in range(rng.randrange(8, 40)):
                match rng.choice(("submit", "submit", "abort", "update", "pause", "rest", *["step"] * 6)):
                    case "submit":
                        engine.submit(self.request(f"{number}", stream=rng.random() < 0.3))
                        number += 1
                    case "abort":
                        name = f"{rng.randrange(number + 1)}"
                        note(engine.abort(None if rng.random() < 0.2 else [name]))
                    case "update":
                        version += 1
                        engine.update_weights(self.weights(version))
                    case "pause":
                        paused = not paused
                        (engine.pause if paused else engine.resume)()
                    case "rest" if rng.random() < 0.2:
                        note(engine.abort())
                        engine.rest()
                        version += 1
                        awake(engine, self.weights(version))
                    case _:
                        note(engine.step())
            engine.resume()
            note(drain(engine))
            assert sorted(got) == sorted(f"{i}" for i in range(number))
            for chunks in got.values():
                assert [c.finish_reason is not None for c in chunks] == [False] * (len(chunks) - 1) + [True]
                versions = [chunk.version for chunk in chunks if chunk.token_ids]
                assert versions == sorted(versions)
                ids = ids_of(chunks)
                if set(versions) <= {0}:
                    assert ids == expected[: len(ids)]
                if chunks[-1].finish_reason is FinishReason.LENGTH:
                    assert len(ids) == self.num_tokens

    @contextmanager
    def serve(self) -> Iterator[DrivenEngine]:
        """An engine that holds version 0 at the beginning of the block, and rests at its end."""
        engine = DrivenEngine(self.make())
        awake(engine, self.weights(0))
        yield engine
        engine.rest()

    def request(
        self, name: str, *, done: Sequence[int] = (), seed: int = 3, stream: bool = False
    ) -> GenerationRequest:
        """A request whose turn has sampled `done` elsewhere."""
        prompt = [*self.prompt, *done]
        left = self.num_tokens - len(done)
        return GenerationRequest(name, prompt, len(done), left, (), self.sampling(seed), stream)

    def sample_alone(self) -> list[int]:
        """The tokens that the request gets from version 0 where nothing happens."""
        with self.serve() as engine:
            return ids_of(sample(engine, self.request("r")))


def until(act: Callable[[], object], is_done: Callable[[], bool]) -> None:
    """Act until it is done. Raises AssertionError if that takes too long."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_done():
        assert time.monotonic() < deadline, f"not done within {PATIENCE_S:.0f} s"
        act()


def catch(act: Callable[[], object], kind: type[Exception]) -> Exception:
    """The error of this kind that the act raises."""
    try:
        act()
    except kind as error:
        return error
    raise AssertionError(f"nothing raised {kind.__name__}")
