"""The images of one session, numbered by their first appearance in the messages of its prompts. Its tokens
hold negative ids made of these numbers in place of placeholders (sf_core/models/images/placeholders.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from sf_core.dataplane.chat.messages import Message, list_image_parts
from sf_core.models.images.placeholders import find_image_spans, image_id, restore_placeholders
from sf_core.models.images.processor_config import ImageProcessorConfig
from sf_core.types import Ids, ImageSpan

IMAGE_BYTES = 300
"""Measured memory of a number and a size."""

ExpandPlaceholders = Callable[[Ids], Ids]
"""Replaces each placeholder among the last ids of a rendered prompt by the negative id of its image, once
for each token of the image."""


class SessionImages:
    def __init__(self) -> None:
        self._sizes: dict[str, tuple[int, int]] = {}
        """Heights and widths by hash, in the order of their numbers."""

    @property
    def num_bytes(self) -> int:
        return IMAGE_BYTES * len(self._sizes)

    def register(self, messages: Iterable[Message]) -> None:
        """Number the images of a new prompt's messages."""
        for part in list_image_parts(messages):
            self._sizes.setdefault(part["sha256"], (part["height"], part["width"]))

    def placeholder_expander(
        self, messages: Iterable[Message], image_processor: ImageProcessorConfig | None
    ) -> ExpandPlaceholders:
        """For a prompt of these messages, of which the last may be new."""
        if image_processor is None:
            return lambda ids: ids
        numbers = {sha256: number for number, sha256 in enumerate(self._sizes)}
        picture_ids = []
        lengths = []
        for part in list_image_parts(messages):
            picture_ids.append(image_id(numbers.setdefault(part["sha256"], len(numbers))))
            lengths.append(image_processor.count_tokens(part["height"], part["width"]))

        def expand(ids: Ids) -> Ids:
            placeholders = np.flatnonzero(ids == image_processor.token_id)
            if not len(placeholders):
                return ids
            with_ids = ids.copy()
            repeats = np.ones(len(ids), np.int64)
            # the ids are the end of the prompt, so its placeholders are the last ones
            with_ids[placeholders] = picture_ids[-len(placeholders) :]
            repeats[placeholders] = lengths[-len(placeholders) :]
            return np.repeat(with_ids, repeats)

        return expand

    def read(self, expanded: Ids, image_processor: ImageProcessorConfig) -> tuple[Ids, list[ImageSpan]]:
        """The ids as the network reads them, and where which image is."""
        spans = [
            ImageSpan(sha256, 0, image_processor.count_tokens(height, width), height, width)
            for sha256, (height, width) in self._sizes.items()
        ]
        return restore_placeholders(expanded, image_processor.token_id), find_image_spans(expanded, spans)
