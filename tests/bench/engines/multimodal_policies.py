"""Versions of the built-in policy that sees, as engines take them, and its log-probs by transformers."""

from __future__ import annotations

import io
import random
import shutil
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageDraw
from safetensors.torch import load_file, save_file
from transformers import Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from sf_core.config import PolicyConfig
from sf_core.models.builtin import make_policy
from sf_core.models.images.processor_config import (
    PLACEHOLDER_LOGIT_BIAS,
    ImageProcessorConfig,
    read_image_processor,
)
from sf_core.models.language import VISION_TOWER_PREFIX
from sf_core.training.policy_folder import read_model_config
from sf_core.types import ImageSpan, Sampling, WeightsRef
from storage.media import read_image, store_image
from storage.tensors.weights import FILE_NAME, save_weights
from tests.bench.engines.scored import score_drawn


class MultimodalPolicies:
    """Policies of one run, with its images."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.media_dir = str(root / "run" / "media")
        self.start_dir = str(root / "start")
        make_policy(self.start_dir, PolicyConfig(sees=True, hidden_size=64, num_layers=2), seed=0)
        image_processor = read_image_processor(self.start_dir)
        assert image_processor is not None
        self.image_processor: ImageProcessorConfig = image_processor
        self.vocab_size = int(read_model_config(self.start_dir)["text_config"]["vocab_size"])

    def folder(self, version: int) -> str:
        """What is published of a version: the language part alone, or version 0 whole."""
        folder = self._root / f"v{version}"
        if version and not folder.exists():
            changed = {
                k: t for k, t in self._change(version).items() if not k.startswith(VISION_TOWER_PREFIX)
            }
            save_weights(str(folder), changed, version)
        return str(folder) if version else self.start_dir

    def ref(self, version: int) -> WeightsRef:
        return WeightsRef(version, self.folder(version))

    def whole(self, version: int) -> str:
        """A folder that transformers loads."""
        folder = self._root / f"whole{version}"
        if not folder.exists():
            shutil.copytree(self.start_dir, folder)
            save_file(self._change(version), folder / FILE_NAME, {"format": "pt"})
        return str(folder)

    def draw(self, rng: random.Random) -> ImageSpan:
        """A stored image of a size that the policy sees; its `start` is 0."""
        height, width = self.image_processor.smart_resize(rng.randrange(20, 200), rng.randrange(20, 200))
        image = Image.new("RGB", (width, height), "white")
        corner = rng.randrange(width // 2), rng.randrange(height // 2)
        colour = tuple(rng.randrange(256) for _ in range(3))
        ImageDraw.Draw(image).rectangle([*corner, width - 5, height - 9], fill=colour)
        file = io.BytesIO()
        image.save(file, "PNG")
        sha256 = store_image(self.media_dir, file.getvalue())
        return ImageSpan(sha256, 0, self.image_processor.count_tokens(height, width), height, width)

    def logprobs(
        self,
        folder: str,
        ids: Sequence[int],
        images: Sequence[ImageSpan],
        start: int,
        sampling: Sampling,
    ) -> npt.NDArray[np.float32]:
        """Log-probs of ids[start:] by the model in the folder, under the distribution that is drawn from."""
        model = _loaded(folder)
        processor = Qwen2VLImageProcessorPil.from_pretrained(self.start_dir)
        shown = [Image.open(io.BytesIO(read_image(self.media_dir, image.sha256))) for image in images]
        seen = processor(shown, return_tensors="pt") if shown else {}
        whole = torch.tensor([[*ids]])
        kinds = {"mm_token_type_ids": (whole == self.image_processor.token_id).int()} if shown else {}
        with torch.inference_mode():
            logits = model(input_ids=whole, **seen, **kinds).logits[0, start - 1 : -1]
            logits[:, self.image_processor.token_id] += PLACEHOLDER_LOGIT_BIAS
        return score_drawn(logits, ids[start:], sampling)

    def _change(self, version: int) -> dict[str, torch.Tensor]:
        """The tensors of a version, tower and all."""
        tensors = load_file(f"{self.start_dir}/{FILE_NAME}")
        generator = torch.Generator().manual_seed(version)
        for name, tensor in tensors.items():
            if version and not name.startswith(VISION_TOWER_PREFIX):
                tensor += 0.05 * torch.randn(tensor.shape, generator=generator)
        return tensors


def place_images(
    parts: Sequence[int | ImageSpan], image_processor: ImageProcessorConfig
) -> tuple[list[int], tuple[ImageSpan, ...]]:
    """The ids of a prompt, and its images, from single ids and images in order."""
    ids: list[int] = []
    spans: list[ImageSpan] = []
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
        else:
            spans.append(ImageSpan(part.sha256, len(ids), part.length, part.height, part.width))
            ids += [image_processor.token_id] * part.length
    return ids, tuple(spans)


@lru_cache(maxsize=4)
def _loaded(folder: str) -> Qwen2_5_VLForConditionalGeneration:
    return Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
