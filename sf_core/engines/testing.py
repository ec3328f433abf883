"""The contract of engines, as tests: a test class inherits from EngineTests and says how its engine is made.

Needs no pytest. A pytest fixture of the subclass may set what `make` needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from sf_core.engines.protocol import Engine
from sf_core.types import Chunk, FinishReason, GenerationRequest, Sampling

MAX_STEPS = 100_000


class EngineTests:
    prompt: Sequence[int] = (5, 6, 7, 8)
    num_tokens = 24
    """Budget of a turn; the engine must be able to sample so many tokens after the prompt."""

    def make(self) -> Engine:
        """A new engine that holds version 0. Equal engines sample equal tokens for equal requests."""
        raise NotImplementedError

    def weights(self, version: int) -> str:
        """A folder whose weights the engine can load."""
        return ""

    def test_an_idle_engine_samples_nothing(self) -> None:
        engine = self.make()
        assert (engine.version, engine.num_requests) == (0, 0)
        assert engine.step() == [] and engine.abort() == []
        engine.close()

    def test_a_request_ends_once_with_a_log_prob_for_every_token(self) -> None:
        engine = self.make()
        for name, stream in (("whole", False), ("streamed", True)):
            engine.submit(self._request(name, stream=stream))
        assert engine.num_requests == 2
        chunks = _drain(engine)
        for name in ("whole", "streamed"):
            own = [chunk for chunk in chunks if chunk.request_id == name]
            assert [chunk.finish_reason is not None for chunk in own] == [False] * (len(own) - 1) + [True]
            assert 0 < len(_ids(own)) <= self.num_tokens
            assert own[-1].finish_reason is not FinishReason.ABORT
            if own[-1].finish_reason is FinishReason.LENGTH:
                assert len(_ids(own)) == self.num_tokens
        for chunk in chunks:
            assert len(chunk.token_ids) == len(chunk.logprobs)
            assert all(math.isfinite(logprob) and logprob <= 0 for logprob in chunk.logprobs)
            assert chunk.version == 0

    def test_a_streamed_request_is_reported_token_by_token(self) -> None:
        engine = self.make()
        engine.submit(self._request("r", stream=True))
        chunks = _drain(engine)
        assert len([chunk for chunk in chunks if chunk.token_ids]) == len(_ids(chunks))

    def test_the_tokens_of_a_request_do_not_depend_on_the_others(self) -> None:
        expected = self._alone()
        engine = self.make()
        engine.submit(self._request("before", seed=4))
        early = engine.step()
        engine.submit(self._request("r"))
        engine.submit(self._request("after", seed=5))
        chunks = [chunk for chunk in early + _drain(engine) if chunk.request_id == "r"]
        assert _ids(chunks) == expected

    def test_a_name_is_taken_until_its_request_has_ended(self) -> None:
        engine = self.make()
        engine.submit(self._request("r"))
        try:
            engine.submit(self._request("r"))
        except ValueError as error:
            assert "'r'" in str(error)
        else:
            raise AssertionError("the same request was accepted twice")
        _drain(engine)
        engine.submit(self._request("r"))
        assert _ids(_drain(engine)) == self._alone()

    def test_an_aborted_request_goes_on_elsewhere_without_a_lost_or_repeated_token(self) -> None:
        expected = self._alone()
        for num_steps in (0, 1, 3, 17):
            engine = self.make()
            engine.submit(self._request("r", stream=num_steps == 3))
            chunks = [chunk for _ in range(num_steps) for chunk in engine.step()]
            chunks += engine.abort(["r", "unknown"])
            assert (chunks[-1].finish_reason, engine.num_requests) == (FinishReason.ABORT, 0)
            done = _ids(chunks)
            other = self.make()
            other.submit(self._request("r", done=done))
            assert done + _ids(_drain(other)) == expected

    def test_abort_ends_all_requests_or_those_that_are_named(self) -> None:
        engine = self.make()
        for name in "abc":
            engine.submit(self._request(name))
        assert [chunk.request_id for chunk in engine.abort(["b"])] == ["b"]
        assert engine.num_requests == 2
        assert sorted(chunk.request_id for chunk in engine.abort()) == ["a", "c"]
        assert engine.num_requests == 0 and engine.step() == []

    def test_tokens_carry_the_version_of_the_weights_that_sampled_them(self) -> None:
        engine = self.make()
        engine.submit(self._request("r"))
        chunks = [chunk for _ in range(3) for chunk in engine.step()]
        engine.load_weights(self.weights(7), 7)
        assert (engine.version, engine.num_requests) == (7, 1)
        chunks += _drain(engine)
        versions = [chunk.version for chunk in chunks]
        assert versions == sorted(versions) and set(versions) <= {0, 7}
        assert chunks[-1].version == 7 and chunks[-1].finish_reason is not None
        engine.submit(self._request("next"))
        assert {chunk.version for chunk in _drain(engine)} == {7}

    def _request(
        self, name: str, *, done: Sequence[int] = (), seed: int = 3, stream: bool = False
    ) -> GenerationRequest:
        """A request whose turn has sampled `done` elsewhere."""
        prompt, left = [*self.prompt, *done], self.num_tokens - len(done)
        return GenerationRequest(name, prompt, len(done), left, (), Sampling(seed=seed), stream)

    def _alone(self) -> list[int]:
        engine = self.make()
        engine.submit(self._request("r"))
        return _ids(_drain(engine))


def _drain(engine: Engine) -> list[Chunk]:
    chunks: list[Chunk] = []
    for _ in range(MAX_STEPS):
        if not engine.num_requests:
            return chunks
        chunks += engine.step()
    raise AssertionError(f"{engine.num_requests} requests did not end in {MAX_STEPS} steps")


def _ids(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]
