"""Images are stored once, and found only as they were stored."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from storage.media import media_file, read_image, store_image


def test_image_is_stored_once(tmp_path: Path) -> None:
    folder = str(tmp_path / "media")
    name = store_image(folder, b"png")
    assert name == hashlib.sha256(b"png").hexdigest()
    before = os.stat(media_file(folder, name))
    assert store_image(folder, b"png") == name
    assert os.stat(media_file(folder, name)).st_ino == before.st_ino
    assert [file.name for file in Path(folder).iterdir()] == [f"{name}.png"]
    assert read_image(folder, name) == b"png"


def test_missing_or_changed_image_is_refused(tmp_path: Path) -> None:
    folder = str(tmp_path)
    name = store_image(folder, b"png")
    Path(media_file(folder, name)).write_bytes(b"another")
    with pytest.raises(ValueError, match=f"{name}.png does not have the SHA-256 in its name"):
        read_image(folder, name)
    Path(media_file(folder, name)).unlink()
    with pytest.raises(ValueError, match=f"{name}.png is missing, but a trajectory contains this image"):
        read_image(folder, name)
