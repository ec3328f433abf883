"""What a trained network reads of images: the features that the frozen tower of a policy makes of them.

Ranks exchange nothing for them: those whose rows have images and those whose rows have none make the same
calls.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from PIL import Image
from transformers import AutoConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from sf_core.models.images.processor_config import FEATURE_CACHE_BYTES, read_image_processor
from sf_core.models.language import VISION_TOWER_PREFIX
from sf_core.models.pretrained.needed_weights import load_model
from sf_core.training.packing.trie import Microbatch
from storage.media import ImageSpan, read_image


class VisionTower:
    """The tower of a multimodal policy. It is not trained: the models of a run share one."""

    def __init__(
        self, model_dir: str, media: str, device: str = "cpu", dtype: torch.dtype | Literal["auto"] = "auto"
    ) -> None:
        """`media`: the folder of the run's images. `dtype`: that of computing. Raises ValueError if the
        policy of the Hugging Face folder does not see."""
        image_processor = read_image_processor(model_dir)
        if image_processor is None:
            raise ValueError(f"{model_dir}: this model does not see images, but a trajectory has images")
        self.placeholder = image_processor.token_id
        self._media = media
        config = AutoConfig.from_pretrained(model_dir, trust_remote_code=False).vision_config
        renamed = {rf"^{VISION_TOWER_PREFIX}": ""}
        self._network = load_model(_Vision, model_dir, config=config, dtype=dtype, key_mapping=renamed)
        self._network.requires_grad_(False).to(device)
        # never torchvision's, which need not be there
        self._processor = Qwen2VLImageProcessorPil.from_pretrained(model_dir)
        self._cache: OrderedDict[str, torch.Tensor] = OrderedDict()
        self._cache_bytes = 0

    def move(self, device: torch.device) -> None:
        self._network.to(device)

    def add_features(self, microbatch: Microbatch) -> Microbatch:
        """The microbatch with the features of its images. Raises ValueError, one sentence, if an image is
        missing or is not what the policy saw."""
        if microbatch.feature_indices is None:
            return microbatch
        whole = torch.cat([self._encode(span) for span in microbatch.images])
        parts = microbatch.feature_indices
        return replace(microbatch, features=whole[parts.cpu()].to(parts.device))

    @torch.no_grad()
    def _encode(self, span: ImageSpan) -> torch.Tensor:
        """The features of an image [length, width], in the host's memory."""
        if (cached := self._cache.get(span.sha256)) is not None:
            self._cache.move_to_end(span.sha256)
            return cached
        image = Image.open(io.BytesIO(read_image(self._media, span.sha256)))
        # it has its size already
        read = self._processor([image], do_resize=False, return_tensors="pt").to(self._network.device)
        pixels = read["pixel_values"].to(self._network.dtype)
        grid = read["image_grid_thw"]
        features: torch.Tensor = self._network(pixels, grid_thw=grid).pooler_output.cpu()
        if len(features) != span.length:
            raise ValueError(
                f"image {span.sha256} has {len(features)} tokens, but a trajectory has "
                f"{span.length} tokens for it"
            )
        self._cache[span.sha256] = features
        self._cache_bytes += features.nbytes
        while self._cache_bytes > FEATURE_CACHE_BYTES and len(self._cache) > 1:
            self._cache_bytes -= self._cache.popitem(last=False)[1].nbytes
        return features


def embed(microbatch: Microbatch, embedding: torch.Tensor) -> torch.Tensor:
    """What the network reads of each token [N, width]."""
    if microbatch.image_positions is None or microbatch.features is None:
        return F.embedding(microbatch.token_ids, embedding)
    # names of images are no ids
    x = F.embedding(microbatch.token_ids.clamp(min=0), embedding)
    return x.index_copy(0, microbatch.image_positions, microbatch.features.to(x.dtype))


class _Vision(Qwen2_5_VisionTransformerPretrainedModel):
    # what reads tokens
    _keys_to_ignore_on_load_unexpected = (r"^(model|lm_head)\.",)
