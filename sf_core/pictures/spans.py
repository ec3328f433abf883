"""Pictures among token ids. All placeholders are one id, so that prompts with different pictures may have the
same ids: whatever compares ids compares names, which are below 0, in their place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from sf_core.types import Ids, PictureSpan


def name_of(number: int) -> int:
    """What stands for each token of the picture of this number."""
    return -1 - number


def name_pictures(ids: Ids, spans: Iterable[PictureSpan], numbers: Mapping[str, int]) -> Ids:
    """The ids with names in place of placeholders; `numbers` of the pictures by their hashes."""
    named = ids.copy()
    for span in spans:
        named[span.start : span.start + span.length] = name_of(numbers[span.sha256])
    return named


def find_pictures(named: Ids, pictures: Sequence[PictureSpan]) -> list[PictureSpan]:
    """Where the pictures of these numbers are; their own `start` is ignored. Inverse of `name_pictures`, also
    of one that was cut off: its span is shorter than the picture."""
    spans: list[PictureSpan] = []
    for start, end in pairwise(np.flatnonzero(np.diff(named, prepend=0, append=0)).tolist()):
        if named[start] >= 0:
            continue
        picture = pictures[-1 - int(named[start])]
        for at in range(start, end, picture.length):
            length = min(picture.length, end - at)
            spans.append(PictureSpan(picture.sha256, at, length, picture.height, picture.width))
    return spans


def restore_placeholders(named: Ids, token_id: int) -> Ids:
    """The ids as the network reads them."""
    return np.where(named < 0, np.int32(token_id), named)
