"""Images among token ids. All placeholders have the same token id, so prompts with different images may
have equal ids. Prompts are therefore compared with an id below 0 per image in place of its placeholders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from sf_core.types import Ids, ImageSpan


def image_id(number: int) -> int:
    """The negative id that replaces each placeholder of the image with this number."""
    return -1 - number


def insert_image_ids(ids: Ids, spans: Iterable[ImageSpan], numbers: Mapping[str, int]) -> Ids:
    """The ids with negative ids in place of placeholders. `numbers`: number of each image, by its hash."""
    expanded = ids.copy()
    for span in spans:
        expanded[span.start : span.start + span.length] = image_id(numbers[span.sha256])
    return expanded


def find_image_spans(expanded: Ids, images: Sequence[ImageSpan]) -> list[ImageSpan]:
    """The spans of the negative ids. `images`: the images by their numbers; their `start` is ignored. The
    span of an image that was cut off is shorter than the image."""
    spans: list[ImageSpan] = []
    for start, end in pairwise(np.flatnonzero(np.diff(expanded, prepend=0, append=0)).tolist()):
        if expanded[start] >= 0:
            continue
        image = images[-1 - int(expanded[start])]
        # the same image may be repeated without a token between
        for offset in range(start, end, image.length):
            length = min(image.length, end - offset)
            spans.append(ImageSpan(image.sha256, offset, length, image.height, image.width))
    return spans


def restore_placeholders(expanded: Ids, token_id: int) -> Ids:
    """The ids as the network reads them, with the placeholder `token_id` in place of negative ids."""
    return np.where(expanded < 0, np.int32(token_id), expanded)
