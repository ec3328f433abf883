"""The images of a run: each that an agent sends is decoded once, resized, and stored before anything that
shows it is acknowledged. Agents send all of a conversation's images with every request.

There are two lanes. An image that takes long moves from the quick lane to the slow one, so that others need
not wait for it.
"""

from __future__ import annotations

import asyncio
import os
from binascii import Error as Base64Error
from binascii import a2b_base64
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import NamedTuple

from sf_core.dataplane.chat.messages import Part, SentImage
from sf_core.dataplane.errors import RETRY_AFTER_S, ApiError, WrongField, remedy
from sf_core.models.images.decoder_process import DecoderError, SlowImageError, preprocess_isolated
from sf_core.models.images.processor_config import ImageProcessorConfig
from storage.media import store_image

NUM_KNOWN = 20_000
"""Number of images of a run that are known without being decoded again; each takes some 500 bytes."""

QUICK_S = 0.5
SLOW_S = 10.0
"""Most CPU seconds per image in each lane. On a slow core a photograph of 12 megapixels takes 0.2 s, and
the largest images take 2 s."""

_quick = ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="images")
_slow = ThreadPoolExecutor(2, thread_name_prefix="slow-images")
"""Few, because an image may take 1 GiB while it is decoded. Each thread has a process that decodes."""

_FROM_URL_ALPHABET = bytes.maketrans(b"-_", b"+/")
"""google-genai sends base64 with the letters of URLs."""

_Source = tuple[bytes, ImageProcessorConfig]
"""Digest of what was sent, and how it is seen."""


class _Unusable(NamedTuple):
    """An image that cannot be shown."""

    reason: str


class Media:
    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._made: dict[_Source, asyncio.Future[Part | _Unusable]] = {}
        """The facts of images that are stored, or will be. Refused images are in it too, because an agent
        sends them again with each request."""

    async def complete(self, sent: Sequence[SentImage], image_processor: ImageProcessorConfig) -> None:
        """Give the parts that show these images their facts; the images are stored then. Raises ApiError
        400 for one that cannot be shown, and 503 if one cannot be stored."""
        digests = await asyncio.to_thread(_digest, sent)
        # one after the other: a request occupies one thread of the lanes at a time
        for image, digest in zip(sent, digests, strict=True):
            making = self._find_or_make(image, (digest, image_processor))
            image.part.update(await self._await_facts(image.where, making))

    def _find_or_make(self, sent: SentImage, source: _Source) -> asyncio.Future[Part | _Unusable]:
        if (made := self._made.get(source)) is None:
            made = asyncio.ensure_future(_make_in_lane(sent.data, source[1], self._folder))
            made.add_done_callback(lambda done: self._forget_failed(source, done))
            if len(self._made) == NUM_KNOWN:
                del self._made[next(iter(self._made))]
            self._made[source] = made
        return made

    def _forget_failed(self, source: _Source, made: asyncio.Future[Part | _Unusable]) -> None:
        if made.cancelled() or made.exception() is not None:
            self._made.pop(source, None)

    async def _await_facts(self, where: str, made: asyncio.Future[Part | _Unusable]) -> Part:
        try:
            # shielded, because other requests may wait for the same image
            facts = await asyncio.shield(made)
        except DecoderError as error:
            raise ApiError(
                503,
                f"The data plane cannot decode images: {error}. Send this request again.",
                code="media_undecoded",
                retry_after_s=RETRY_AFTER_S,
            ) from None
        except OSError as error:
            raise ApiError(
                503,
                f"The data plane cannot write images to {self._folder}: {error.strerror or error}. "
                f"{remedy(error, 'Free space there or repair the storage')}, then send this request again.",
                code="media_unwritable",
                retry_after_s=RETRY_AFTER_S,
            ) from None
        if isinstance(facts, _Unusable):
            raise WrongField(where, f"{where} has an image that cannot be used: {facts.reason}")
        return facts


def _digest(sent: Sequence[SentImage]) -> list[bytes]:
    return [blake2b(image.data.encode(), digest_size=16).digest() for image in sent]


async def _make_in_lane(data: str, image_processor: ImageProcessorConfig, folder: str) -> Part | _Unusable:
    loop = asyncio.get_running_loop()
    try:
        return await loop.run_in_executor(_quick, _decode_and_store, data, image_processor, folder, QUICK_S)
    except SlowImageError:
        pass
    try:
        return await loop.run_in_executor(_slow, _decode_and_store, data, image_processor, folder, SLOW_S)
    except SlowImageError as error:
        return _Unusable(str(error))


def _decode_and_store(
    data: str, image_processor: ImageProcessorConfig, folder: str, cpu_s: float
) -> Part | _Unusable:
    """The facts of an image, which is stored. Raises SlowImageError, DecoderError and OSError."""
    try:
        fitted = preprocess_isolated(
            a2b_base64(data.encode().translate(_FROM_URL_ALPHABET)), image_processor, cpu_s
        )
    except Base64Error:
        return _Unusable("its base64 is broken")
    except ValueError as error:
        return _Unusable(str(error))
    return {"sha256": store_image(folder, fitted.png), "width": fitted.width, "height": fitted.height}
