"""What every server of vLLM is asked, without vLLM."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from sf_core.engines.protocol import EngineLostError, WeightsRefusedError
from sf_core.engines.vllm.images import MultimodalRequests
from sf_core.engines.vllm.vllm_engine import VllmEngine
from sf_core.engines.vllm.weight_loading import FullWeights, LoraWeights, PolicyFolder
from sf_core.testing.driven_engine import DrivenEngine
from sf_core.testing.engines import EngineTests, awake, drain, ids_of, sample_by_both, until
from sf_core.types import Chunk, WeightsRef
from tests.bench.properties import examples
from tests.sf_core.engines.vllm.fake_server import CONTEXT, FakeVllm, next_token
from tests.sf_core.engines.vllm.running_server import RunningServer


class ServingTests(EngineTests):
    num_tokens = 200
    """So many that some are left when a test interrupts."""
    num_sequences = examples(20)

    @pytest.fixture(autouse=True)
    def _of(self, fake: FakeVllm, versions: Path) -> Iterator[None]:
        self.fake = fake
        self.folders = versions
        self.engine = self.made()
        yield
        self.engine.close()

    adapts = False
    media_dir: str | None = None

    def made(self, *, keep_kv: bool = False) -> VllmEngine:
        start = f"{self.folders}/{'start' if self.adapts else 'v-0'}"
        policy = PolicyFolder(start, untied=False)
        weight_loading = LoraWeights(start, policy) if self.adapts else FullWeights(policy)
        images = None
        if policy.image_processor is not None and self.media_dir is not None:
            images = MultimodalRequests(policy.image_processor, self.media_dir)
        self.place = RunningServer(url=self.fake.url)
        return VllmEngine(self.place, weight_loading, policy.vocab_size, CONTEXT, keep_kv, None, images)

    def make(self) -> VllmEngine:
        return self.engine

    @property
    def refused(self) -> WeightsRef:
        return WeightsRef(1, f"{self.folders}/not-there")

    def weights(self, version: int) -> WeightsRef:
        return WeightsRef(version, f"{self.folders}/v-{version}")

    def check_tokens(self, chunks: Sequence[Chunk]) -> None:
        """Check that every token of one request is by the weights of its version."""
        ids = [*self.prompt]
        for chunk in chunks:
            for token in chunk.token_ids:
                assert token == next_token(ids, chunk.version)
                ids.append(token)

    def test_an_update_asks_for_what_is_left_with_new_noise_and_without_kv(self) -> None:
        self.check_update(keep_kv=False)

    def check_update(self, *, keep_kv: bool) -> None:
        """Check what is asked for after an update."""
        self.engine = self.made(keep_kv=keep_kv)
        engine = DrivenEngine(self.engine)

        def update() -> list[Chunk]:
            awake(engine, self.weights(0))
            self.fake.bodies.clear()
            engine.submit(self.request("r", stream=True))
            chunks: list[Chunk] = []
            until(lambda: chunks.extend(engine.step()), lambda: len(chunks) >= 3)
            return chunks + awake(engine, self.weights(1)) + drain(engine)

        chunks = sample_by_both(update)
        self.check_tokens(chunks)
        assert len(ids_of(chunks)) == self.num_tokens
        whole, left = self.fake.bodies
        done = [c.version for c in chunks for _ in c.token_ids].count(0)
        assert left["token_ids"] == [*self.prompt, *ids_of(chunks)[:done]]
        assert left["sampling_params"]["max_tokens"] == self.num_tokens - done
        assert left["sampling_params"]["seed"] != whole["sampling_params"]["seed"]
        assert left["request_id"] != whole["request_id"]
        assert (left["cache_salt"] == whole["cache_salt"]) == keep_kv

    def test_weights_that_follow_each_other_sample_under_their_own_names(self) -> None:
        with self.serve() as engine:
            engine.submit(self.request("r", stream=True))
            chunks: list[Chunk] = []
            for number in range(1, 16):
                engine.pause()
                engine.update_weights(self.weights(2 * number))
                # so that the next ones come at any moment of taking these
                engine.wait(0.002 * number)
                engine.update_weights(self.weights(2 * number + 1))
                engine.resume()
                chunks += engine.step()
            self.check_tokens(chunks + awake(engine, self.weights(40)) + drain(engine))

    def test_a_request_that_is_aborted_before_vllm_knows_it_has_no_tokens_of_the_weights_on_their_way(
        self,
    ) -> None:
        with self.serve() as engine:
            self.fake.late_s = 0.03
            for name in "abcde":
                engine.update_weights(self.weights(1))
                engine.submit(self.request(name, stream=True))
                self.check_tokens(engine.abort())
                engine.rest()
                awake(engine, self.weights(0))

    def test_any_sequence_of_weights_and_refusals_leaves_an_engine_that_serves(self) -> None:
        rng = random.Random(1)
        with self.serve() as engine:
            for _ in range(examples(25)):
                engine.submit(self.request("r", stream=True))
                chunks: list[Chunk] = []
                for _ in range(rng.randrange(2, 12)):
                    engine.update_weights(rng.choice((self.weights(1), self.weights(2), self.refused)))
                    engine.wait(rng.uniform(0, 0.012))
                    with suppress(WeightsRefusedError):
                        chunks += engine.step()

                def go_on() -> None:
                    with suppress(WeightsRefusedError):
                        chunks.extend(engine.step())  # noqa: B023

                until(go_on, lambda: engine.num_requests == 0)
                self.check_tokens(chunks)
                assert len(ids_of(chunks)) == self.num_tokens

    def test_an_engine_is_closed_whose_last_stream_has_not_ended(self) -> None:
        engine = DrivenEngine(self.make())
        awake(engine, self.weights(0))
        self.fake.never_ends = True
        engine.submit(self.request("r"))
        drain(engine)

    def test_tokens_of_weights_of_another_name_are_not_taken_for_ours(self) -> None:
        with self.serve() as engine:
            self.fake.wrong_name = "somebody's"
            engine.submit(self.request("r"))
            with pytest.raises(EngineLostError, match="somebody's"):
                drain(engine)

    def test_a_request_that_vllm_ends_by_itself_was_lost(self) -> None:
        with self.serve() as engine:
            self.fake.aborts_by_itself = True
            engine.submit(self.request("r"))
            with pytest.raises(EngineLostError, match="was not cancelled"):
                drain(engine)

    def test_a_server_that_fails_at_rest_is_lost_in_the_next_lease_and_connected_again(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        expected = self.sample_alone()
        self.fake.has_failed = True
        with pytest.raises(EngineLostError, match="/pause with 503"), self.serve():
            pass
        assert "vLLM is lost: vLLM answered /pause with 503" in caplog.text
        self.fake.has_failed = False
        assert self.sample_alone() == expected

    def test_errors_in_a_stream_end_the_request_or_the_engine(self) -> None:
        with self.serve() as engine:
            self.fake.error = {"error": {"code": 400, "message": "too long"}}
            engine.submit(self.request("r"))
            assert drain(engine) == [Chunk.failed("r", 0, "vLLM refused a request: too long")]
            self.fake.error = {"error": {"code": 500, "message": "a bug"}}
            engine.submit(self.request("r"))
            assert drain(engine) == [Chunk.failed("r", 0, "vLLM: 500 a bug")]
            self.fake.error = {"error": {"code": 500, "message": "EngineCore is dead"}}
            self.fake.is_dead = True
            engine.submit(self.request("r"))
            with pytest.raises(EngineLostError, match="EngineCore is dead"):
                drain(engine)
