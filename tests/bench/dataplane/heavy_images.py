"""Small files of images that take much CPU time or memory to decode."""

from __future__ import annotations

import io
import struct
import zlib

from PIL import Image

LARGE_WEBP = bytes.fromhex("524946461a000000574542505650384c0e0000002fffdfff07071011fd0f4444ff03")
"""8192 by 8192 pixels of one colour; decoding takes 1.05 GiB."""


def many_scans(count: int, size: tuple[int, int] = (800, 800)) -> bytes:
    """A progressive JPEG that repeats its last scan; 100 times take some 25 ms."""
    file = io.BytesIO()
    Image.new("RGB", size).save(file, "JPEG", progressive=True)
    data = file.getvalue()[:-2]
    end = file.getvalue()[-2:]
    return data + data[data.rindex(b"\xff\xda") :] * count + end


def many_chunks(count: int) -> bytes:
    """A PNG with empty chunks of an unknown type; 100,000 take some 0.2 s."""
    file = io.BytesIO()
    Image.new("RGB", (56, 56)).save(file, "PNG")
    chunk = struct.pack(">I4sI", 0, b"abCd", zlib.crc32(b"abCd"))
    return file.getvalue()[:33] + chunk * count + file.getvalue()[33:]
