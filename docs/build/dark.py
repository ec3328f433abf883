"""The dark variants of the pictures in docs, made from the pictures: `python -m docs.build.dark`.

A document names both, as README.md does. GitHub and the site show the one that fits the reader's theme.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

PICTURES = Path(__file__).parents[1] / "pictures"
GROUND = 0.13
INK = 0.92
"""Lightness that white and black get: close to those of the site and of GitHub."""


def darken(picture: Image.Image) -> Image.Image:
    """The picture with its lightness mirrored. Each colour keeps its hue, so legends stay true."""
    colours = np.asarray(picture.convert("RGB"), dtype=np.float64) / 255
    lightness = (colours.max(axis=2, keepdims=True) + colours.min(axis=2, keepdims=True)) / 2
    mirrored = colours + 1 - 2 * lightness
    shown = GROUND + (INK - GROUND) * mirrored
    return Image.fromarray(np.rint(255 * shown).astype(np.uint8))


def list_pictures() -> Iterator[tuple[Path, Path]]:
    """Each picture, and the file of its dark variant."""
    for file in sorted(PICTURES.glob("*.png")):
        if not file.stem.endswith("-dark"):
            yield file, file.with_name(f"{file.stem}-dark.png")


def main() -> None:
    for file, dark in list_pictures():
        with Image.open(file) as picture:
            darken(picture).save(dark, optimize=True)


if __name__ == "__main__":
    main()
