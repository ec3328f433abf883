"""The configuration of a policy's image processor, from the files of its Hugging Face folder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from storage.files import join, read_if_there
from storage.json_files import load_json

MULTIMODAL_MODEL_TYPES = ("qwen2_5_vl",)
"""Values of `model_type` whose policies are shown images."""

PREPROCESSOR_CONFIG = "preprocessor_config.json"
"""The file that says how images become the network's input."""

PLACEHOLDER_LOGIT_BIAS = -100.0
"""Added to the placeholder's logit wherever a multimodal policy samples or is scored, so that it is never
sampled: a sampled one shows nothing."""

FEATURE_CACHE_BYTES = 4 << 30
"""Most memory of its host that a trainer takes for features of images, of those that it saw last."""

MAX_ASPECT = 200
"""Largest ratio of an image's sides, as Qwen's processor has it."""

_DEFAULT_PIXELS = (56 * 56, 28 * 28 * 1280)


class UnusableImageError(ValueError):
    """An image cannot be shown. The message is a clause whose subject is the image."""


@dataclass(frozen=True, slots=True)
class ImageProcessorConfig:
    """The sizes and the tokens that the image processor of a policy gives to images."""

    token_id: int
    """The placeholder: an image is as many of it as its length."""
    token_side: int
    """Pixels of each side of the square that one token shows."""
    min_pixels: int
    max_pixels: int

    def with_max_tokens(self, max_tokens: int | None) -> ImageProcessorConfig:
        """This configuration with at most so many tokens for an image; None: as many as the processor
        allows. Raises ValueError if the processor makes small images larger than that."""
        if max_tokens is None:
            return self
        most = max_tokens * self.token_side**2
        fewest = -(-self.min_pixels // self.token_side**2)
        if max_tokens < fewest:
            raise ValueError(
                f"rollout.max_picture_tokens is {max_tokens}, but the policy's processor uses at least "
                f"{fewest} tokens per image"
            )
        return replace(self, max_pixels=min(self.max_pixels, most))

    def describe(self) -> str:
        low, high = (pixels // self.token_side**2 for pixels in (self.min_pixels, self.max_pixels))
        return (
            f"the policy sees images as {low} to {high} tokens each, one token per {self.token_side} by "
            f"{self.token_side} pixels; larger images are scaled down"
        )

    def smart_resize(self, height: int, width: int) -> tuple[int, int]:
        """The height and width to which an image is resized: multiples of `side` within the limits, at about
        its aspect, as `smart_resize` of Qwen's processor has them. Raises UnusableImageError if there are
        none."""
        if max(height, width) > MAX_ASPECT * min(height, width):
            raise UnusableImageError(
                f"the image has {width} by {height} pixels; the ratio of its sides must not exceed "
                f"{MAX_ASPECT}"
            )
        new_height = round(height / self.token_side) * self.token_side
        new_width = round(width / self.token_side) * self.token_side
        if new_height * new_width > self.max_pixels:
            scale = math.sqrt(height * width / self.max_pixels)
            new_height, new_width = (
                max(self.token_side, math.floor(n / scale / self.token_side) * self.token_side)
                for n in (height, width)
            )
        elif new_height * new_width < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (height * width))
            new_height, new_width = (
                math.ceil(n * scale / self.token_side) * self.token_side for n in (height, width)
            )
        if not self.min_pixels <= new_height * new_width <= self.max_pixels:
            raise UnusableImageError(
                f"the image has {width} by {height} pixels and cannot be scaled to between "
                f"{self.min_pixels} and {self.max_pixels} pixels in all without a large change "
                "of its aspect ratio"
            )
        return new_height, new_width

    def count_tokens(self, height: int, width: int) -> int:
        """Number of tokens of an image of this size, which is one that `fit` gives."""
        return (height // self.token_side) * (width // self.token_side)


def read_image_processor(folder: str) -> ImageProcessorConfig | None:
    """The image processor of the policy in this folder; None if the policy reads no images. Raises
    ValueError, one sentence, if a file of the processor is missing or broken."""
    config = _read_json(folder, "config.json")
    if config.get("model_type") not in MULTIMODAL_MODEL_TYPES:
        return None
    processor = _read_json(folder, PREPROCESSOR_CONFIG)
    try:
        size = processor.get("size") or {}
        low, high = (
            processor.get(f"{name}_pixels") or size.get(edge) or default
            for name, edge, default in zip(
                ("min", "max"), ("shortest_edge", "longest_edge"), _DEFAULT_PIXELS, strict=True
            )
        )
        token_side = int(processor.get("patch_size", 14)) * int(processor.get("merge_size", 2))
        return ImageProcessorConfig(int(config["image_token_id"]), token_side, int(low), int(high))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder}: {PREPROCESSOR_CONFIG} or config.json is broken: {error!r}") from None


def _read_json(folder: str, name: str) -> Mapping[str, Any]:
    data = read_if_there(join(folder, name))
    if data is None:
        raise ValueError(
            f"{folder}: no {name}; save the image processor there too: "
            "AutoImageProcessor.from_pretrained(...).save_pretrained(folder)"
        )
    try:
        return dict(load_json(data))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder}: {name} is broken: {error}") from None
