"""Images as clients send them become what the policy sees."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image, PngImagePlugin
from PIL.PngImagePlugin import PngInfo

from sf_core.models.images import preprocess
from sf_core.models.images.preprocess import preprocess_image
from sf_core.models.images.processor_config import ImageProcessorConfig

IMAGE_PROCESSOR = ImageProcessorConfig(
    token_id=5, token_side=28, min_pixels=4 * 28 * 28, max_pixels=64 * 28 * 28
)

BROKEN = "the image is broken, or its format is not PNG, JPEG, WebP or GIF"


def save(image: Image.Image, kind: str = "PNG", **more: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **more)
    return file.getvalue()


def fit(data: bytes) -> np.ndarray:
    """[height, width, 3] of the fitted image."""
    preprocessed = preprocess_image(data, IMAGE_PROCESSOR)
    image = Image.open(io.BytesIO(preprocessed.png))
    assert image.mode == "RGB"
    assert image.size == (preprocessed.width, preprocessed.height)
    return np.asarray(image)


def test_image_of_the_grid_keeps_its_pixels() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (84, 112, 3), dtype=np.uint8)
    np.testing.assert_array_equal(fit(save(Image.fromarray(pixels))), pixels)


@pytest.mark.parametrize(
    ("mode", "colour", "shown"),
    [
        ("L", 100, (100, 100, 100)),
        ("P", 0, (0, 0, 0)),
        ("1", 1, (255, 255, 255)),
        ("I;16", 257 * 90, (90, 90, 90)),
        ("RGBA", (200, 0, 0, 0), (255, 255, 255)),
        ("RGBA", (200, 0, 0, 255), (200, 0, 0)),
        ("LA", (0, 0), (255, 255, 255)),
    ],
)
def test_every_kind_of_pixel_is_shown(mode: str, colour: Any, shown: tuple[int, int, int]) -> None:
    image = Image.new(mode, (56, 56), colour)
    np.testing.assert_array_equal(fit(save(image)), np.full((56, 56, 3), shown))


def test_transparent_palette_is_put_on_white() -> None:
    image = Image.new("P", (56, 56), 0)
    image.putpalette([10, 20, 30])
    np.testing.assert_array_equal(fit(save(image, transparency=0)), np.full((56, 56, 3), 255))


def test_of_a_phones_image_the_first_frame_is_shown() -> None:
    frames = [Image.new("RGB", (56, 112), colour) for colour in ("white", "black")]
    exif = Image.Exif()
    exif[0x112] = 6
    phones = save(frames[0], "MPO", save_all=True, append_images=frames[1:], exif=exif)
    assert getattr(Image.open(io.BytesIO(phones)), "n_frames", 0) == 2
    np.testing.assert_array_equal(fit(phones), np.full((56, 112, 3), 255))


def test_image_is_turned_as_exif_says() -> None:
    pixels = np.zeros((56, 112, 3), np.uint8)
    pixels[:, :56] = 255
    exif = Image.Exif()
    exif[0x112] = 6
    turned = fit(save(Image.fromarray(pixels), exif=exif))
    assert turned.shape == (112, 56, 3)
    assert turned[0].min() == 255
    assert turned[-1].max() == 0


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", BROKEN),
        (b"\x89PNG broken", BROKEN),
        # Pillow reads them, and starts a program for EPS
        (save(Image.new("RGB", (90, 90)), "TIFF"), BROKEN),
        (save(Image.new("RGB", (90, 90)), "EPS"), BROKEN),
        (save(Image.new("RGB", (90, 90)))[:-40], "the image cannot be decoded: "),
        (
            save(Image.new("RGB", (8, 1700))),
            "the image has 8 by 1700 pixels; the ratio of its sides must not exceed 200",
        ),
        (
            save(
                Image.new("RGB", (56, 56)),
                "GIF",
                save_all=True,
                append_images=[Image.new("RGB", (56, 56), "red")],
            ),
            "the image is animated",
        ),
    ],
)
def test_what_cannot_be_shown_is_refused(data: bytes, told: str) -> None:
    with pytest.raises(ValueError) as refusal:
        preprocess_image(data, IMAGE_PROCESSOR)
    assert told in str(refusal.value)


def test_large_images_are_refused_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    data = save(Image.new("RGB", (300, 300)))
    monkeypatch.setattr(preprocess, "MAX_PIXELS", 300 * 300 - 1)
    with pytest.raises(ValueError, match="the image has 300 by 300 pixels; the limit is 89999 pixels"):
        preprocess_image(data, IMAGE_PROCESSOR)
    monkeypatch.setattr(preprocess, "MAX_BYTES", len(data) - 1)
    with pytest.raises(ValueError, match=f"the image has {len(data)} bytes; the limit is {len(data) - 1}"):
        preprocess_image(data, IMAGE_PROCESSOR)


def test_a_long_text_in_a_small_file_is_not_unpacked() -> None:
    texts = PngInfo()
    texts.add_text("comment", "x" * (PngImagePlugin.MAX_TEXT_CHUNK + 1), zip=True)
    data = save(Image.new("RGB", (56, 56)), pnginfo=texts)
    assert len(data) < 10_000
    with pytest.raises(ValueError, match=r"^the image cannot be decoded: Decompressed data too large"):
        preprocess_image(data, IMAGE_PROCESSOR)
