"""Names of images among token ids are undone exactly."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sf_core.models.images.placeholders import find_image_spans, insert_image_ids, restore_placeholders
from sf_core.types import ImageSpan

PLACEHOLDER = 5
LENGTHS = (1, 3, 4)


@given(st.lists(st.one_of(st.integers(6, 9), st.integers(-3, -1)), max_size=12))
def test_names_are_undone(parts: list[int]) -> None:
    """A part is an id of text, or -1 minus the number of an image; equal images may be neighbours."""
    ids: list[int] = []
    spans: list[ImageSpan] = []
    for part in parts:
        if part >= 0:
            ids.append(part)
            continue
        number = -1 - part
        spans.append(ImageSpan(str(number), len(ids), LENGTHS[number], 28, 28))
        ids += [PLACEHOLDER] * LENGTHS[number]
    given_ids = np.array(ids, np.int32)
    expanded = insert_image_ids(given_ids, spans, {"0": 0, "1": 1, "2": 2})
    images = [ImageSpan(str(k), 0, length, 28, 28) for k, length in enumerate(LENGTHS)]
    assert find_image_spans(expanded, images) == spans
    np.testing.assert_array_equal(restore_placeholders(expanded, PLACEHOLDER), given_ids)
    assert (given_ids >= 0).all()


def test_cut_image_has_a_shorter_span() -> None:
    expanded = np.array([7, -1, -1, -1, -1], np.int32)
    found = find_image_spans(expanded, [ImageSpan("a", 0, 3, 28, 84)])
    assert [(span.start, span.length) for span in found] == [(1, 3), (4, 1)]
