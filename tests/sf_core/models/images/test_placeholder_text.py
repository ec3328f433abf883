"""Texts that spell the placeholder of images."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sf_core.models.images.placeholder_text import Placeholder

PAD = Placeholder("<|image_pad|>")
MORE = "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("value", "mended"),
    [
        ("see <|image_pad|>!", f"see <{MORE}|image_pad|>!"),
        ("<<|image_pad|>|image_pad|>", f"<<{MORE}|image_pad|>|image_pad|>"),
        (
            {"<|image_pad|>": [1, None, "<|image_pad|>"]},
            {f"<{MORE}|image_pad|>": [1, None, f"<{MORE}|image_pad|>"]},
        ),
        (
            {
                "role": "user",
                "content": [{"type": "text", "text": "1 < 2 <|im"}, {"type": "text", "text": "age_pad|>"}],
            },
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": f"1 <{MORE} 2 <{MORE}|im"},
                    {"type": "text", "text": "age_pad|>"},
                ],
            },
        ),
        ("<|image_pad |>", "<|image_pad |>"),
        ({"content": "1 <", "name": "2"}, {"content": "1 <", "name": "2"}),
    ],
)
def test_a_spelled_placeholder_gets_a_character_more(value: Any, mended: Any) -> None:
    assert PAD.mend(value) == mended
    assert PAD.is_in(value) == (value != mended)


PIECES = st.lists(st.sampled_from(["<", "|", "<|image_pad|>", "<|image_", "pad|>", " ", "\n", "a"])).map(
    "".join
)
VALUES = st.recursive(PIECES, lambda inner: st.lists(inner) | st.dictionaries(PIECES, inner), max_leaves=6)


@given(value=VALUES)
def test_what_is_mended_spells_none_and_loses_nothing(value: Any) -> None:
    mended = PAD.mend(value)
    assert not PAD.is_in(mended)
    assert repr(mended).replace(MORE, "") == repr(value)
    assert PAD.mend(mended) == mended
