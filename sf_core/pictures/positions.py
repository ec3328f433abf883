"""Where tokens stand for a policy that sees: text in a row, the tokens of a picture in a plane."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from storage.media import PictureSpan


def place_tokens(length: int, pictures: Iterable[PictureSpan]) -> npt.NDArray[np.int64]:
    """[length, 3] time, row and column of each of so many tokens, which show these pictures, as Qwen2.5-VL
    counts them: after a picture text goes on behind the larger of its sides."""
    places = np.empty((length, 3), np.int64)
    at = reached = 0
    for picture in pictures:
        _count_on(places[at : picture.start], reached)
        reached += picture.start - at
        rows, columns = count_sides(picture)
        at = picture.start + picture.length
        seen = np.arange(picture.length)
        places[picture.start : at] = np.stack([0 * seen, seen // columns, seen % columns], 1) + reached
        reached += max(rows, columns)
    _count_on(places[at:], reached)
    return places


def count_sides(picture: PictureSpan) -> tuple[int, int]:
    """Tokens of a column and of a row of a whole picture."""
    side = math.isqrt(picture.height * picture.width // picture.length)
    return picture.height // side, picture.width // side


def _count_on(places: npt.NDArray[np.int64], reached: int) -> None:
    places[:] = np.arange(reached, reached + len(places))[:, None]
