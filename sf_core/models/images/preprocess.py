"""Preprocessing of an image from a client, for engine and trainer alike. Slow: called in a thread.

Engine and trainer do not resize the image again: the log-probs after resizing by Pillow and by torchvision
differ by up to 4e-4 nats.
"""

from __future__ import annotations

import io
from typing import NamedTuple

from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from sf_core.models.images.processor_config import ImageProcessorConfig, UnusableImageError

MAX_BYTES = 32 * 2**20
"""Most bytes of an image's file."""

MAX_PIXELS = 64 * 2**20
"""Most pixels of an image as it is sent; a decoded one takes four bytes for each, and twice as many if it is
transparent."""

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Formats that are read, as by the providers; for others, such as EPS, Pillow starts programs."""

_COMPRESS_LEVEL = 1
"""Level of PNG's compression. On drawn screens the default takes a third more time and a fifth more
space, and the highest five times the time."""


class PreprocessedImage(NamedTuple):
    """An image of the size that the policy sees."""

    png: bytes
    height: int
    width: int


def preprocess_image(data: bytes, image_processor: ImageProcessorConfig) -> PreprocessedImage:
    """Decode, turn as EXIF says, put what is transparent on white, and resize. Raises UnusableImageError if
    it cannot be shown. For images of strangers there is `preprocess_isolated`."""
    if len(data) > MAX_BYTES:
        raise UnusableImageError(f"the image has {len(data)} bytes; the limit is {MAX_BYTES} bytes")
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as opened:
            _check(opened)
            height, width = image_processor.smart_resize(*_size_after_exif(opened))
            ImageOps.exif_transpose(opened, in_place=True)
            image = _to_rgb(opened)
            if image.size != (width, height):
                image = image.resize((width, height), Image.Resampling.BICUBIC)
    except UnidentifiedImageError:
        raise UnusableImageError("the image is broken, or its format is not PNG, JPEG, WebP or GIF") from None
    except Image.DecompressionBombError:
        raise UnusableImageError(f"the image has too many pixels; the limit is {MAX_PIXELS} pixels") from None
    except (UnusableImageError, MemoryError):
        raise
    except Exception as error:  # Pillow's decoders raise OSError, ValueError, SyntaxError and others
        message = " ".join(str(error).split()) or type(error).__name__
        raise UnusableImageError(f"the image cannot be decoded: {message}") from None
    file = io.BytesIO()
    _on_white(image).save(file, "PNG", compress_level=_COMPRESS_LEVEL)
    return PreprocessedImage(file.getvalue(), height, width)


def _check(image: Image.Image) -> None:
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise UnusableImageError(
            f"the image has {width} by {height} pixels; the limit is {MAX_PIXELS} pixels"
        )
    # MPO: a JPEG of a phone with further frames, such as depth; the first one is opened
    if getattr(image, "is_animated", False) and image.format != "MPO":
        raise UnusableImageError("the image is animated")


def _size_after_exif(image: Image.Image) -> tuple[int, int]:
    """Height and width after the rotation that EXIF asks for."""
    width, height = image.size
    is_on_its_side = image.getexif().get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
    return (width, height) if is_on_its_side else (height, width)


def _to_rgb(image: Image.Image) -> Image.Image:
    """In RGB, or in RGBA if parts are transparent; copied only if it must be."""
    if image.mode.startswith("I"):
        # 16 bits of grey; Pillow would cut off what is above 255
        image = image.point(lambda value: value / 257).convert("L")
    mode = "RGBA" if image.has_transparency_data else "RGB"
    return image if image.mode == mode else image.convert(mode)


def _on_white(image: Image.Image) -> Image.Image:
    if image.mode == "RGB":
        return image
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image).convert("RGB")
