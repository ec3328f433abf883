"""A server that is shown images: the contract with prompts that have them, compared with transformers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from msgspec.structs import replace

from sf_core.config import RunConfig
from sf_core.engines.protocol import AsyncEngine, Engine
from sf_core.engines.registry import make_engine
from sf_core.testing.driven_engine import DrivenEngine
from sf_core.testing.engines import awake, catch, drain, ids_of, sample
from sf_core.types import Chunk, FinishReason, GenerationRequest, ImageSpan, Sampling, WeightsRef
from storage.media import media_file
from tests.bench import engines
from tests.bench.engines import multimodal_policies
from tests.sf_core.engines.vllm.small_policies import CONTEXT


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> multimodal_policies.MultimodalPolicies:
    return multimodal_policies.MultimodalPolicies(tmp_path_factory.mktemp("seeing"))


def config_of(policies: multimodal_policies.MultimodalPolicies, **sections: object) -> RunConfig:
    run = Path(policies.media_dir).parent
    engine = {"kind": "vllm", "context_length": CONTEXT, "max_running": 32}
    return RunConfig.model_validate(
        {"run_id": run.name, "storage": {"root": str(run.parent)}, "engine": engine, **sections}
    )


@pytest.fixture(scope="module")
def seeing(vllm: str, policies: multimodal_policies.MultimodalPolicies) -> Iterator[Engine]:
    """Its server is started by the first test."""
    engine = make_engine(config_of(policies), policies.start_dir)
    yield engine
    engine.close()


class TestMultimodal(engines.model_contract.FolderEngineTests):
    num_tokens = 120
    num_sequences = 5
    context_length = CONTEXT
    tolerance = 1e-5

    @pytest.fixture(autouse=True)
    def _of(self, seeing: AsyncEngine, policies: multimodal_policies.MultimodalPolicies) -> None:
        self.engine = seeing
        self.policies = policies
        self.vocab_size = policies.vocab_size
        rng = random.Random(1)
        one = policies.draw(rng)
        two = policies.draw(rng)
        # one of them twice
        self.prompt, self.images = multimodal_policies.place_images(
            [5, one, 6, 7, two, 8, one, 9], policies.image_processor
        )
        # after a test that failed
        seeing.loop.run_until_complete(seeing.rest())

    def make(self) -> Engine:
        return self.engine

    def folder(self, version: int) -> str:
        return self.policies.folder(version)

    def sampling(self, seed: int) -> Sampling:
        # what vLLM draws depends on interruptions (docs/decisions/026-vllm.md)
        return Sampling(temperature=0)

    def request(
        self, name: str, *, done: Sequence[int] = (), seed: int = 3, stream: bool = False
    ) -> GenerationRequest:
        request = super().request(name, done=done, seed=seed, stream=stream)
        return replace(request, images=self.images)

    def logprobs(
        self, version: int, ids: Sequence[int], start: int, sampling: Sampling
    ) -> npt.NDArray[np.float32]:
        return self.policies.logprobs(self.policies.whole(version), ids, self.images, start, sampling)

    def test_a_sequence_ends_at_the_end_of_the_context(self) -> None:
        self.prompt = [*self.prompt, *[9] * (self.context_length - 9 - len(self.prompt))]
        with self.serve() as engine:
            chunks = sample(engine, replace(self.request("r"), max_tokens=100))
            assert (len(ids_of(chunks)), chunks[-1].finish_reason) == (9, FinishReason.LENGTH)

    def test_random_requests_at_once_are_expanded_as_the_gateway_does_and_have_right_log_probs(self) -> None:
        rng = random.Random(2)
        requests = []
        for number in range(32):
            parts: list[int | ImageSpan] = [5]
            for _ in range(rng.randrange(1, 4)):
                parts += [rng.randrange(5, 100) for _ in range(rng.randrange(9))]
                parts += [3, self.policies.draw(rng), 4]
            ids, images = multimodal_policies.place_images(parts, self.policies.image_processor)
            sampling = Sampling(seed=number)
            requests.append(GenerationRequest(f"{number}", ids, 0, 20, (), sampling, images=images))
        with self.serve() as engine:
            chunks = sample(engine, *requests)
            for request in requests:
                self.images = request.images
                own = [chunk for chunk in chunks if chunk.request_id == request.request_id]
                assert len(ids_of(own)) == 20
                self.check_logprobs(request, own)

    def test_prompts_without_images_never_sample_the_placeholder_either(self) -> None:
        self.images = ()
        self.prompt = (5, 6)
        with self.serve() as engine:
            request = replace(self.request("r"), sampling=Sampling(seed=1, temperature=3))
            chunks = sample(engine, request)
            assert self.policies.image_processor.token_id not in ids_of(chunks)
            self.check_logprobs(request, chunks)

    def test_equal_ids_with_other_images_are_other_prompts_for_caches_too(self) -> None:
        rng = random.Random(5)
        shown: dict[int, ImageSpan] = {}
        while len(shown) < 2:
            image = self.policies.draw(rng)
            if image.length == 9:
                shown[len(shown)] = image
        ids, _ = multimodal_policies.place_images([5, shown[0], *[7] * 200], self.policies.image_processor)
        logprobs: list[list[float]] = []
        with self.serve() as engine:
            for number in (0, 1, 0, 1):
                self.images = (replace(shown[number], start=1),)
                request = GenerationRequest("r", ids, 0, 9, (), self.sampling(0), images=self.images)
                chunks = sample(engine, request)
                self.check_logprobs(request, chunks)
                logprobs.append([logprob for chunk in chunks for logprob in chunk.logprobs])
        assert np.allclose(logprobs[0], logprobs[2], atol=1e-5)
        assert not np.allclose(logprobs[0], logprobs[1], atol=1e-3)

    def test_images_that_are_missing_broken_or_of_another_size_end_their_requests_alone(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        good = self.policies.draw(random.Random(3))
        missing = "0" * 64
        other = self.policies.draw(random.Random(4))
        Path(media_file(self.policies.media_dir, "1" * 64)).write_bytes(b"broken")
        with self.serve() as engine:
            told = []
            for sha256, length in ((missing, 6), ("1" * 64, 6), (good.sha256, good.length + 1)):
                image = ImageSpan(sha256, 0, length, 56, 84)
                ids, images = multimodal_policies.place_images(
                    [5, image, 6, other], self.policies.image_processor
                )
                engine.submit(GenerationRequest("r", ids, 0, 9, (), self.sampling(0), images=images))
                (chunk,) = drain(engine)
                assert chunk == Chunk.failed("r", 0, caplog.messages[-1])
                told.append(chunk.fault)
            assert "is missing" in told[0] and "does not have the SHA-256 in its name" in told[1]
            assert told[2].startswith("vLLM places the images at [{'offset': 1, ")
            request = self.request("r")
            self.check_logprobs(request, sample(engine, request))

    def test_placeholders_without_their_images_are_refused(self) -> None:
        with self.serve() as engine:
            for wrong in (
                replace(self.request("r"), images=()),
                replace(self.request("r"), images=self.images[1:]),
                replace(self.request("r"), prompt_ids=[*self.prompt, self.policies.image_processor.token_id]),
            ):
                error = catch(lambda: engine.submit(wrong), ValueError)  # noqa: B023
                assert "do not match the images of the request" in str(error)
            assert engine.num_requests == 0


class Start(engines.model_folders.ModelFolders):
    """The start folder of policies, for which there are adapters."""

    def __init__(self, policies: multimodal_policies.MultimodalPolicies) -> None:
        self._policies = policies

    def __call__(self, kind: str = "", seed: int = 0) -> str:
        return self._policies.start_dir


# test_adapters.py is nightly, too
@pytest.mark.nightly
def test_adapters_of_the_language_part_sample_with_images(
    vllm: str, policies: multimodal_policies.MultimodalPolicies, tmp_path: Path
) -> None:
    adapters = engines.adapter_folders.AdapterFolders(tmp_path, Start(policies))
    assert not any("visual" in name for name in adapters.factors("", 1))
    engine = DrivenEngine(make_engine(config_of(policies, train={"lora": {}}), adapters.start("")))
    rng = random.Random(6)
    for version in (0, 1, 4):
        awake(engine, WeightsRef(version, adapters.version("", version)))
        ids, images = multimodal_policies.place_images(
            [5, policies.draw(rng), 6, policies.draw(rng), 7], policies.image_processor
        )
        sampling = Sampling(seed=version)
        chunks = sample(engine, GenerationRequest("r", ids, 0, 40, (), sampling, images=images))
        told = [logprob for chunk in chunks for logprob in chunk.logprobs]
        whole = [*ids, *ids_of(chunks)]
        expected = policies.logprobs(adapters.merged("", version), whole, images, len(ids), sampling)
        assert np.abs(expected - np.array(told)).max() < 1e-4
    engine.close()
