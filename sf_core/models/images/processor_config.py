"""The configuration of a policy's image processor, from the files of its Hugging Face folder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from storage.files import join, read_if_there
from storage.json_files import load_json

SEEING = ("qwen2_5_vl",)
"""Values of `model_type` whose policies are shown pictures."""

PROCESSOR = "preprocessor_config.json"
"""The file that says how pictures become the network's input."""

PLACEHOLDER_BIAS = -100.0
"""Added to the placeholder's logit wherever a policy that sees samples or is scored, so that it is never
sampled: a sampled one shows nothing."""

KEPT_BYTES = 4 << 30
"""Most memory of its host that a trainer takes for features of pictures, of those that it saw last."""

MAX_ASPECT = 200
"""Largest ratio of a picture's sides, as Qwen's processor has it."""

_DEFAULT_PIXELS = (56 * 56, 28 * 28 * 1280)


class UnfitError(ValueError):
    """A picture cannot be shown. The message is a clause whose subject is the picture."""


@dataclass(frozen=True, slots=True)
class Sight:
    """The sizes and the tokens that the image processor of a policy gives to pictures."""

    token_id: int
    """The placeholder: a picture is as many of it as its length."""
    side: int
    """Pixels of each side of the square that one token shows."""
    min_pixels: int
    max_pixels: int

    def limit(self, max_tokens: int | None) -> Sight:
        """This sight with at most so many tokens for a picture; None: as many as the processor allows. Raises
        ValueError if the processor makes small pictures larger than that."""
        if max_tokens is None:
            return self
        most = max_tokens * self.side**2
        fewest = -(-self.min_pixels // self.side**2)
        if max_tokens < fewest:
            raise ValueError(
                f"rollout.max_picture_tokens is {max_tokens}, but the policy's processor uses at least "
                f"{fewest} tokens per picture"
            )
        return replace(self, max_pixels=min(self.max_pixels, most))

    def describe(self) -> str:
        low, high = (pixels // self.side**2 for pixels in (self.min_pixels, self.max_pixels))
        return (
            f"the policy sees pictures as {low} to {high} tokens each, one token per {self.side} by "
            f"{self.side} pixels; larger pictures are scaled down"
        )

    def fit(self, height: int, width: int) -> tuple[int, int]:
        """The height and width to which a picture is resized: multiples of `side` within the limits, at about
        its aspect, as `smart_resize` of Qwen's processor has them. Raises UnfitError if there are
        none."""
        if max(height, width) > MAX_ASPECT * min(height, width):
            raise UnfitError(
                f"the picture has {width} by {height} pixels; the ratio of its sides must not exceed "
                f"{MAX_ASPECT}"
            )
        new_height = round(height / self.side) * self.side
        new_width = round(width / self.side) * self.side
        if new_height * new_width > self.max_pixels:
            scale = math.sqrt(height * width / self.max_pixels)
            new_height, new_width = (
                max(self.side, math.floor(n / scale / self.side) * self.side) for n in (height, width)
            )
        elif new_height * new_width < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (height * width))
            new_height, new_width = (math.ceil(n * scale / self.side) * self.side for n in (height, width))
        if not self.min_pixels <= new_height * new_width <= self.max_pixels:
            raise UnfitError(
                f"the picture has {width} by {height} pixels and cannot be scaled to between "
                f"{self.min_pixels} and {self.max_pixels} pixels in all without a large change "
                "of its aspect ratio"
            )
        return new_height, new_width

    def count_tokens(self, height: int, width: int) -> int:
        """Number of tokens of a picture of this size, which is one that `fit` gives."""
        return (height // self.side) * (width // self.side)


def read_sight(folder: str) -> Sight | None:
    """The image processor of the policy in this folder; None if the policy reads no pictures. Raises
    ValueError, one sentence, if a file of the processor is missing or broken."""
    config = _read_json(folder, "config.json")
    if config.get("model_type") not in SEEING:
        return None
    processor = _read_json(folder, PROCESSOR)
    try:
        size = processor.get("size") or {}
        low, high = (
            processor.get(f"{name}_pixels") or size.get(edge) or default
            for name, edge, default in zip(
                ("min", "max"), ("shortest_edge", "longest_edge"), _DEFAULT_PIXELS, strict=True
            )
        )
        side = int(processor.get("patch_size", 14)) * int(processor.get("merge_size", 2))
        return Sight(int(config["image_token_id"]), side, int(low), int(high))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder}: {PROCESSOR} or config.json is broken: {error!r}") from None


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
