"""Every picture of the documents has a dark variant, on GitHub and on the site."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from docs.build.dark import darken, list_pictures
from docs.build.repository import show_both
from tests.bench import ROOT

SHOWN = re.compile(r"(?:!\[[^\]]*\]\(|<img [^>]*src=\")[^)\"]*pictures/(?P<name>[\w-]+)\.png")
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize(("file", "dark"), [*list_pictures()], ids=lambda file: file.stem)
def test_a_dark_variant_is_that_of_its_picture(file: Path, dark: Path) -> None:
    assert dark.exists(), "make it with `python -m docs.build.dark`"
    with Image.open(file) as picture, Image.open(dark) as stored:
        is_newest = np.array_equal(np.asarray(darken(picture)), np.asarray(stored.convert("RGB")))
    assert is_newest, f"{file.name} has changed: call `python -m docs.build.dark`"


def test_every_document_shows_the_dark_variant_of_each_picture() -> None:
    shown = {file: text for file in DOCUMENTS if SHOWN.search(text := file.read_text(encoding="utf-8"))}
    assert len(shown) > 5
    for file, text in shown.items():
        for found in SHOWN.finditer(show_both(text)):
            name = found["name"].removesuffix("-dark")
            assert found[0].startswith("!["), f"{file} shows {name} without a dark variant"
            assert f"{name}-dark.png#only-dark)" in show_both(text)
            assert f"{name}.png#only-light)" in show_both(text)


def test_dark_is_light_mirrored_and_keeps_the_hue() -> None:
    colours = np.array([[[255, 255, 255], [0, 0, 0], [209, 73, 91]]], dtype=np.uint8)
    white, black, red = np.asarray(darken(Image.fromarray(colours)))[0].astype(int)
    assert white.max() < 40 and black.min() > 230
    assert red[0] > red[2] > red[1]


def test_the_site_hides_one_of_the_two_by_the_colours_of_the_reader(site: Path) -> None:
    page = (site / "guides" / "clusters" / "prefect-ui.html").read_text(encoding="utf-8")
    for name, colours in (("prefect-form.png", "light"), ("prefect-form-dark.png", "dark")):
        assert f'src="../../pictures/{name}#only-{colours}"' in page
        assert (site / "pictures" / name).exists()
    assert "<picture>" not in page
