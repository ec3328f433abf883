from itertools import chain

import pytest

from sf_core.engines.protocol import AsyncEngine, Engine
from sf_core.engines.registry import make_engine
from sf_core.testing.driven_engine import DrivenEngine
from sf_core.testing.engines import awake, drain, ids_of, until
from sf_core.types import GenerationRequest, Sampling
from tests.bench.engines.grammar_contract import GrammarEngineTests
from tests.sf_core.engines.vllm import small_policies

pytestmark = pytest.mark.system

GREEDY = Sampling(temperature=0)


class TestContract(GrammarEngineTests):
    """The contract with a tied policy, whose head vLLM's CPU build has as a tensor of its own."""

    num_tokens = 120
    """More than any engine samples in the few steps of a test that interrupts."""
    num_sequences = 5
    num_examples = 5
    context_length = small_policies.CONTEXT

    @pytest.fixture(autouse=True)
    def _of(self, engine: AsyncEngine, tied: small_policies.Policies) -> None:
        self.engine = engine
        self.policies = tied
        # after a test that failed
        engine.loop.run_until_complete(engine.rest())

    def make(self) -> Engine:
        return self.engine

    def folder(self, version: int) -> str:
        return self.policies.folder(version)

    def sampling(self, seed: int) -> Sampling:
        # what vLLM draws depends on interruptions (docs/decisions/026-vllm.md)
        return GREEDY

    def test_what_is_sampled_while_nobody_asks_is_reported(self) -> None:
        expected = self.sample_alone()
        with self.serve() as engine:
            engine.submit(self.request("r"))
            until(lambda: engine.wait(0.05), lambda: engine.num_requests == 0)
            assert ids_of(drain(engine)) == expected

    def test_greedy_turns_go_on_in_the_torch_engine_and_come_back_with_the_same_ids(self) -> None:
        expected = self.sample_alone()
        vllm = DrivenEngine(self.engine)
        torch_engine = DrivenEngine(make_engine(small_policies.config(kind="torch"), self.folder(0)))
        pieces: list[list[int]] = []

        def pass_around() -> None:
            pieces.clear()
            # vLLM samples on while this waits for its first token
            for place, enough in ((vllm, 1), (torch_engine, self.num_tokens // 4), (vllm, 1)):
                done = [*chain.from_iterable(pieces)]
                if len(done) == len(expected):
                    return
                awake(place, self.weights(0))
                place.submit(self.request("r", done=done, stream=True))
                chunks = place.step()
                while place.num_requests and len(ids_of(chunks)) < enough:
                    chunks += place.step()
                pieces.append(ids_of(chunks + place.abort()))
                place.rest()

        until(pass_around, lambda: len(pieces) == 3)
        done = [*chain.from_iterable(pieces)]
        assert done == expected[: len(done)]
        torch_engine.close()

    def test_a_turn_is_drawn_again_as_it_was_and_other_turns_otherwise(self) -> None:
        with self.serve() as engine:
            drawn = []
            for seed in (1, 1, 2):
                engine.submit(GenerationRequest("r", list(self.prompt), 0, 40, (), Sampling(seed=seed)))
                drawn.append(ids_of(drain(engine)))
            assert drawn[0] == drawn[1] != drawn[2]

    def test_what_is_drawn_after_an_interruption_is_no_repetition_of_the_noise_before_it(self) -> None:
        with self.serve() as engine:
            sampling = Sampling(seed=1, temperature=2)
            engine.submit(GenerationRequest("r", [5], 0, 40, (), sampling))
            engine.submit(GenerationRequest("resumed", [5], 40, 40, (), sampling))
            chunks = drain(engine)
            assert ids_of(chunks, "r") != ids_of(chunks, "resumed")
