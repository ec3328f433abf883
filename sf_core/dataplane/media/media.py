"""The pictures of a run: each that an agent sends is decoded once, resized, and stored before anything that
shows it is acknowledged. Agents send all of a conversation's pictures with every request.
"""

from __future__ import annotations

import asyncio
import os
from binascii import Error as Base64Error
from binascii import a2b_base64
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b

from sf_core.dataplane.chat.contents import Part, SentPicture
from sf_core.dataplane.errors import RETRY_AFTER_S, ApiError, WrongField
from sf_core.pictures.fitting import fit_picture
from sf_core.pictures.sight import Sight
from storage.media import store_picture

NUM_KNOWN = 20_000
"""Number of pictures of a run that are known without being decoded again; each takes some 500 bytes."""

_threads = ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="pictures")
"""Few, because a picture may take 500 MB while it is decoded."""

_PLAIN = bytes.maketrans(b"-_", b"+/")
"""Base64 has other letters in URLs, which google-genai sends."""

_Source = tuple[bytes, Sight]
"""Digest of what was sent, and how it is seen."""


class Media:
    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._made: dict[_Source, asyncio.Future[Part]] = {}
        """The facts of pictures that are stored, or will be."""

    async def complete(self, sent: Sequence[SentPicture], sight: Sight) -> None:
        """Give the parts that show these pictures their facts; the pictures are stored then. Raises ApiError
        400 for one that cannot be shown, and 503 if one cannot be stored."""
        digests = await asyncio.to_thread(_digest, sent)
        made = [self._make(one, (digest, sight)) for one, digest in zip(sent, digests, strict=True)]
        for one, facts in zip(sent, made, strict=True):
            one.part.update(await self._wait(one.where, facts))

    def _make(self, sent: SentPicture, source: _Source) -> asyncio.Future[Part]:
        if (made := self._made.get(source)) is None:
            loop = asyncio.get_running_loop()
            made = loop.run_in_executor(_threads, _make, sent.data, source[1], self._folder)
            made.add_done_callback(lambda done: self._forget_failed(source, done))
            if len(self._made) == NUM_KNOWN:
                del self._made[next(iter(self._made))]
            self._made[source] = made
        return made

    def _forget_failed(self, source: _Source, made: asyncio.Future[Part]) -> None:
        if made.cancelled() or made.exception() is not None:
            self._made.pop(source, None)

    async def _wait(self, where: str, made: asyncio.Future[Part]) -> Part:
        try:
            # others may wait for it too
            return await asyncio.shield(made)
        except ValueError as error:
            raise WrongField(where, f"{where} has a picture that cannot be used: {error}") from None
        except OSError as error:
            raise ApiError(
                503,
                f"The data plane cannot write pictures to {self._folder}: {error.strerror or error}. Free "
                "space there or repair the storage, then send this request again.",
                code="media_unwritable",
                retry_after_s=RETRY_AFTER_S,
            ) from None


def _digest(sent: Sequence[SentPicture]) -> list[bytes]:
    return [blake2b(one.data.encode(), digest_size=16).digest() for one in sent]


def _make(data: str, sight: Sight, folder: str) -> Part:
    """The facts of a picture, which is stored."""
    try:
        decoded = a2b_base64(data.encode().translate(_PLAIN))
    except Base64Error:
        raise ValueError("its base64 is broken") from None
    fitted = fit_picture(decoded, sight)
    return {"sha256": store_picture(folder, fitted.png), "width": fitted.width, "height": fitted.height}
