"""The images of a run: PNG files in its `media` folder, each named by the sha256 of its bytes, and
where they are among token ids."""

from __future__ import annotations

import hashlib

import msgspec

from storage.files import exists, join, read_bytes, write_atomic


class ImageSpan(msgspec.Struct, frozen=True, array_like=True):
    """An image among token ids: the `length` placeholders from `start` on show it."""

    sha256: str
    """That of its PNG file in the run's `media` folder, which has the same name."""
    start: int
    length: int
    height: int
    """Pixels, as the policy sees it."""
    width: int


def media_file(folder: str, sha256: str) -> str:
    return join(folder, f"{sha256}.png")


def store_image(folder: str, png: bytes) -> str:
    """Store an image, once; returns its sha256. Raises StorageError or OSError."""
    sha256 = hashlib.sha256(png).hexdigest()
    file = media_file(folder, sha256)
    if not exists(file):
        write_atomic(file, png)
    return sha256


def read_image(folder: str, sha256: str) -> bytes:
    """Raises ValueError, one sentence, if the image is missing or its file has other bytes."""
    file = media_file(folder, sha256)
    try:
        png = read_bytes(file)
    except FileNotFoundError:
        raise ValueError(f"{file} is missing, but a trajectory contains this image") from None
    if hashlib.sha256(png).hexdigest() != sha256:
        raise ValueError(f"{file} does not have the SHA-256 in its name")
    return png
