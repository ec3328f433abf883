"""A screen of buttons: where they are, what a click does, and its image. Knows no policy."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Literal

from PIL import Image, ImageDraw

CELL = 28
MARGIN = 3
"""Pixels of a side of a button's place, and of its rim."""

Colour = Literal["red", "green", "blue", "yellow", "pink", "black"]

COLOURS: dict[Colour, tuple[int, int, int]] = {
    "red": (220, 40, 40),
    "green": (30, 160, 60),
    "blue": (40, 80, 230),
    "yellow": (240, 200, 20),
    "pink": (240, 120, 200),
    "black": (20, 20, 20),
}
PRESSED = (200, 200, 200)

Place = tuple[int, int]
"""Column and row."""


class Screen:
    """Buttons of different colours, by their places; a button that is pressed turns grey."""

    def __init__(self, rows: list[str]) -> None:
        """One character per place: the first letter of a colour, `K` for black, or a dot for none."""
        self.rows = rows
        self.buttons = {
            (column, row): _NAMES[letter]
            for row, letters in enumerate(rows)
            for column, letter in enumerate(letters)
            if letter in _NAMES
        }
        self.pressed: list[Colour] = []
        """Colours of the buttons that were pressed, in order."""
        self._grey: set[Place] = set()

    def click(self, x: int, y: int) -> None:
        """Press the button at this pixel, if there is one that is not pressed yet."""
        cell = x // CELL, y // CELL
        inside = all(MARGIN <= pixel % CELL < CELL - MARGIN for pixel in (x, y))
        if inside and cell in self.buttons and cell not in self._grey:
            self._grey.add(cell)
            self.pressed.append(self.buttons[cell])

    def draw(self) -> bytes:
        """The screen as it is now, as PNG."""
        image = _wallpaper(len(self.rows[0]) * CELL, len(self.rows) * CELL).copy()
        pen = ImageDraw.Draw(image)
        for (column, row), colour in self.buttons.items():
            left = column * CELL + MARGIN
            top = row * CELL + MARGIN
            size = CELL - 2 * MARGIN - 1
            fill = PRESSED if (column, row) in self._grey else COLOURS[colour]
            pen.rounded_rectangle((left, top, left + size, top + size), 4, fill)
        file = io.BytesIO()
        image.save(file, "PNG", compress_level=1)
        return file.getvalue()


def write_rows(buttons: Mapping[Place, str], columns: int, rows: int) -> list[str]:
    """What `Screen` reads."""
    letters: dict[str, str] = {name: letter for letter, name in _NAMES.items()}
    return [
        "".join(letters.get(buttons.get((column, row), ""), ".") for column in range(columns))
        for row in range(rows)
    ]


def centre(cell: Place) -> tuple[int, int]:
    """The pixel in the middle of a place."""
    column, row = cell
    return column * CELL + CELL // 2, row * CELL + CELL // 2


def as_parts(texts: Iterable[str], png: bytes) -> list[dict[str, Any]]:
    """Texts and an image as OpenAI's chat API takes them."""
    url = "data:image/png;base64," + base64.b64encode(png).decode()
    return [
        *({"type": "text", "text": text} for text in texts),
        {"type": "image_url", "image_url": {"url": url}},
    ]


@lru_cache(maxsize=4)
def _wallpaper(width: int, height: int) -> Image.Image:
    """Shades from left to right and from top to bottom, from which a small network sees where it looks."""
    size = (width, height)
    gradient = Image.linear_gradient("L")
    red = gradient.rotate(90).resize(size)
    green = Image.new("L", size, 128)
    blue = gradient.resize(size)
    return Image.merge("RGB", (red, green, blue))


_NAMES = {("K" if name == "black" else name[0]): name for name in COLOURS}
