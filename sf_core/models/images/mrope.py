"""Multimodal rotary positions (M-RoPE) of a prompt: text is a line, and each picture is a grid."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from storage.media import PictureSpan


def mrope_positions(length: int, pictures: Iterable[PictureSpan]) -> npt.NDArray[np.int64]:
    """[length, 3] time, row and column of each token, as Qwen2.5-VL counts them. The text after a picture
    continues behind the larger side of its grid."""
    positions = np.empty((length, 3), np.int64)
    next_token = 0
    next_position = 0
    for picture in pictures:
        _fill_text(positions[next_token : picture.start], next_position)
        next_position += picture.start - next_token
        rows, columns = token_grid(picture)
        next_token = picture.start + picture.length
        index = np.arange(picture.length)
        grid = np.stack([0 * index, index // columns, index % columns], 1)
        positions[picture.start : next_token] = grid + next_position
        next_position += max(rows, columns)
    _fill_text(positions[next_token:], next_position)
    return positions


def token_grid(picture: PictureSpan) -> tuple[int, int]:
    """Rows and columns of the tokens of a whole picture."""
    token_side = math.isqrt(picture.height * picture.width // picture.length)
    return picture.height // token_side, picture.width // token_side


def _fill_text(positions: npt.NDArray[np.int64], first: int) -> None:
    """Text counts up alike on all three axes."""
    positions[:] = np.arange(first, first + len(positions))[:, None]
