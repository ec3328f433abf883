"""Multimodal rotary positions (M-RoPE) of a prompt: text is a line, and each image is a grid."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from storage.media import ImageSpan


def mrope_positions(length: int, images: Iterable[ImageSpan]) -> npt.NDArray[np.int64]:
    """[length, 3] time, row and column of each token, as Qwen2.5-VL counts them. The text after an image
    continues behind the larger side of its grid."""
    positions = np.empty((length, 3), np.int64)
    next_token = 0
    next_position = 0
    for span in images:
        _fill_text(positions[next_token : span.start], next_position)
        next_position += span.start - next_token
        rows, columns = token_grid(span)
        next_token = span.start + span.length
        index = np.arange(span.length)
        grid = np.stack([0 * index, index // columns, index % columns], 1)
        positions[span.start : next_token] = grid + next_position
        next_position += max(rows, columns)
    _fill_text(positions[next_token:], next_position)
    return positions


def token_grid(span: ImageSpan) -> tuple[int, int]:
    """Rows and columns of the tokens of a whole image."""
    token_side = math.isqrt(span.height * span.width // span.length)
    return span.height // token_side, span.width // token_side


def _fill_text(positions: npt.NDArray[np.int64], first: int) -> None:
    """Text counts up alike on all three axes."""
    positions[:] = np.arange(first, first + len(positions))[:, None]
