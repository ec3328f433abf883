"""The contract of engines whose tokens come from a network, as tests: they sample what the weights give.

Needs no pytest. A pytest fixture of the subclass may set what `make` needs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from sf_core.engines.protocol import StepEngine, WeightsRefusedError
from sf_core.testing.engines import EngineTests, awake, catch, drain, ids_of, sample, sample_by_both, until
from sf_core.types import Chunk, FinishReason, GenerationRequest, Sampling, WeightsRef


class ModelEngineTests(EngineTests):
    vocab_size = 60
    context_length = 100
    """Longest sequence of the engine."""
    tolerance = 1e-4
    """Largest difference of a log-prob, in nats, and in parts of a log-prob that is larger than 1."""
    samplings: Sequence[Sampling] = (
        Sampling(seed=1),
        Sampling(seed=2, temperature=0.7),
        Sampling(seed=3, temperature=1.3, top_p=0.9),
        Sampling(seed=4, top_k=7),
        Sampling(seed=5, temperature=0.8, top_k=20, top_p=0.8),
    )
    num_at_once = 40
    """Seeded requests that are sent together, more than the engine prefills in a step."""

    def logprobs(
        self, version: int, ids: Sequence[int], start: int, sampling: Sampling
    ) -> npt.NDArray[np.float32]:
        """Log-probs of ids[start:] by a forward pass over all ids with the weights of this version, under the
        distribution that is drawn from."""
        raise NotImplementedError

    def make_damaged(self) -> WeightsRef:
        """Weights whose file is cut off."""
        raise NotImplementedError

    def test_a_stop_token_ends_a_request_and_is_part_of_it(self) -> None:
        expected = self.sample_alone()
        with self.serve() as engine:
            stop = expected[7]
            # an id that never comes is no hindrance
            request = replace(self.request("r"), stop_token_ids=(self.vocab_size - 1, stop))
            chunks = sample(engine, request)
            ended = min(expected.index(token) for token in (self.vocab_size - 1, stop) if token in expected)
            assert ids_of(chunks) == expected[: ended + 1]
            assert chunks[-1].finish_reason is FinishReason.STOP

    def test_a_sequence_ends_at_the_end_of_the_context(self) -> None:
        with self.serve() as engine:
            prompt = [5 + i % 40 for i in range(self.context_length - 9)]
            request = replace(self.request("r"), prompt_ids=prompt, max_tokens=100)
            chunks = sample(engine, request)
            assert len(ids_of(chunks)) == 9
            assert chunks[-1].finish_reason == FinishReason.LENGTH

    def test_requests_that_cannot_be_done_are_refused_at_once(self) -> None:
        request = self.request("r")
        length = self.context_length
        with self.serve() as engine:
            wrong = {
                f"prompt has 0 tokens; expected 1 to {length - 1}": replace(request, prompt_ids=[]),
                f"prompt has {length} tokens": replace(request, prompt_ids=[5] * length),
                f"a token id outside the vocabulary of {self.vocab_size}": replace(
                    request, prompt_ids=[5, self.vocab_size]
                ),
                "outside the vocabulary": replace(request, prompt_ids=[-1]),
                "max_tokens is 0": replace(request, max_tokens=0),
            }
            for message, refused in wrong.items():
                assert message in str(catch(lambda: engine.submit(refused), ValueError))  # noqa: B023
            assert engine.num_requests == 0

    def test_log_probs_are_those_of_a_full_forward_pass_under_every_sampling(self) -> None:
        with self.serve() as engine:
            requests = [
                replace(self.request(f"{i}"), sampling=sampling) for i, sampling in enumerate(self.samplings)
            ]
            self.check_answers(engine, requests)

    def test_more_seeded_requests_than_a_step_prefills_all_end_with_right_log_probs(self) -> None:
        with self.serve() as engine:
            requests = [
                replace(self.request(f"{i}", seed=i), prompt_ids=[*self.prompt, *([9 + i % 20] * (i % 17))])
                for i in range(self.num_at_once)
            ]
            self.check_answers(engine, requests)

    def test_tokens_before_an_update_are_by_the_old_weights_and_after_it_by_the_new(self) -> None:
        with self.serve() as engine:
            request = self.longest_request()

            def update() -> list[Chunk]:
                awake(engine, self.weights(0))
                engine.submit(request)
                chunks: list[Chunk] = []
                until(lambda: chunks.extend(engine.step()), lambda: len(ids_of(chunks)) >= 3)
                engine.pause()
                chunks += awake(engine, self.weights(1))
                engine.resume()
                return chunks + drain(engine)

            self.check_logprobs(request, sample_by_both(update))

    def test_damaged_weights_are_refused_and_the_old_ones_serve_on(self) -> None:
        expected = self.sample_alone()
        with self.serve() as engine:
            engine.submit(self.request("r"))
            chunks: list[Chunk] = []

            def go_on() -> None:
                while True:
                    chunks.extend(engine.step())

            engine.update_weights(self.make_damaged())
            error = catch(go_on, WeightsRefusedError)
            assert "safetensors" in str(error)
            assert ids_of(chunks + drain(engine)) == expected
            awake(engine, self.weights(2))
            engine.rest()
            engine.update_weights(self.make_damaged())
            assert "safetensors" in str(catch(go_on, ValueError))

    def test_weights_that_follow_each_other_sample_under_their_own_names(self) -> None:
        with self.serve() as engine:
            request = self.longest_request()
            engine.submit(request)
            chunks: list[Chunk] = []
            for i in range(12):
                engine.pause()
                engine.update_weights(self.weights(1 + i % 2))
                # so that the next ones come at any moment of taking these
                engine.wait(0.004 * i)
                engine.update_weights(self.weights(2 - i % 2))
                engine.resume()
                chunks += engine.step()
            self.check_logprobs(request, chunks + awake(engine, self.weights(0)) + drain(engine))

    def test_weights_that_took_the_place_of_others_and_are_refused_leave_an_engine_that_serves(self) -> None:
        with self.serve() as engine:
            for num_steps in range(8):
                request = self.request("r", stream=True)
                engine.submit(request)
                engine.update_weights(self.weights(1 + num_steps % 2))
                chunks = [chunk for _ in range(num_steps) for chunk in engine.step()]
                # of a version that it does not hold yet
                engine.update_weights(replace(self.make_damaged(), version=3))
                catch(lambda: until(lambda: chunks.extend(engine.step()), lambda: False), WeightsRefusedError)  # noqa: B023
                self.check_logprobs(request, chunks + drain(engine))

    def longest_request(self) -> GenerationRequest:
        """A request that is streamed up to the end of the context."""
        return replace(self.request("r", stream=True), max_tokens=self.context_length - len(self.prompt))

    def check_answers(self, engine: StepEngine, requests: Sequence[GenerationRequest]) -> None:
        """Check the log-probs of requests that are sampled together."""
        chunks = sample(engine, *requests)
        for request in requests:
            self.check_logprobs(request, [c for c in chunks if c.request_id == request.request_id])

    def check_logprobs(self, request: GenerationRequest, chunks: Sequence[Chunk]) -> None:
        """Check every token's log-prob against the weights of its chunk's version."""
        start = len(request.prompt_ids)
        sampled = ids_of(chunks)
        expected = {
            version: self.logprobs(version, [*request.prompt_ids, *sampled], start, request.sampling)
            for version in {chunk.version for chunk in chunks if chunk.token_ids}
        }
        place = 0
        for chunk in chunks:
            for logprob in chunk.logprobs:
                wanted = expected[chunk.version][place]
                bound = self.tolerance * max(1.0, abs(wanted))
                assert abs(logprob - wanted) < bound, (place, logprob, wanted)
                place += 1
