"""Where the tokens of text and images stand. Tests of the trainer compare that with transformers."""

from __future__ import annotations

from sf_core.models.images.mrope import mrope_positions, token_grid
from sf_core.types import ImageSpan

TALL = ImageSpan("a", 2, 6, 84, 56)
WIDE = ImageSpan("b", 9, 4, 28, 112)


def test_text_goes_on_behind_the_larger_side_of_an_image() -> None:
    assert (token_grid(TALL), token_grid(WIDE)) == ((3, 2), (1, 4))
    places = mrope_positions(15, [TALL, WIDE]).tolist()
    assert places[:2] == [[0, 0, 0], [1, 1, 1]]
    assert places[2:8] == [[2, 2 + row, 2 + column] for row in range(3) for column in range(2)]
    assert places[8] == [5, 5, 5]
    assert places[9:13] == [[6, 6, 6 + column] for column in range(4)]
    assert places[13:] == [[10] * 3, [11] * 3]
    assert mrope_positions(3, []).tolist() == [[0] * 3, [1] * 3, [2] * 3]
