"""Images in requests to vLLM: each is one placeholder and a file, and what the server has made of them is
compared with what was asked.

vLLM answers without an error if it was given too few images, or shows them at other places.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from sf_core.engines.protocol import EngineLostError
from sf_core.engines.vllm.client import (
    RequestFailedError,
    RequestRefusedError,
    StreamDelta,
    VllmClient,
)
from sf_core.models.images.processor_config import PLACEHOLDER_LOGIT_BIAS, ImageProcessorConfig
from sf_core.types import GenerationRequest, ImageSpan
from storage.files import absolute, is_local, write_atomic
from storage.media import media_file, read_image
from storage.scratch import scratch_folder

_TRIES = 3
"""How often a request with images is sent. The server's front end and its core each keep images. One that
ends on its way between them leaves the front end naming an image that the core lacks: the next request gets
500, and the one after it brings the image again."""

_MOST_COPIES_BYTES = 2 * 2**30
"""Most bytes that copies of a remote storage's images take on this host."""


class MultimodalRequests:
    """What the server of a multimodal policy is asked, beside ids, and must answer."""

    def __init__(self, image_processor: ImageProcessorConfig, media_dir: str) -> None:
        self.token_id = image_processor.token_id
        self._files = _Files(media_dir)

    @property
    def folder(self) -> str:
        """The folder of which the server must be allowed to read files."""
        return self._files.folder

    def check(self, request: GenerationRequest) -> None:
        """Raises ValueError if the placeholders among the ids are not those of the images."""
        shown = [at for span in request.images for at in range(span.start, span.start + span.length)]
        if shown != [at for at, token in enumerate(request.prompt_ids) if token == self.token_id]:
            raise ValueError(
                f"the placeholders ({self.token_id}) among the token ids do not match the images of the "
                "request"
            )

    async def generate(
        self, client: VllmClient, body: dict[str, Any], spans: Sequence[ImageSpan]
    ) -> AsyncGenerator[StreamDelta]:
        """Stream the tokens of a request, whose body has all ids, with its images. Raises as
        `client.generate`, also if an image is missing or broken, or the server shows others."""
        # a sampled one would take the next image when the request is sent again
        body["sampling_params"]["logit_bias"] = {str(self.token_id): PLACEHOLDER_LOGIT_BIAS}
        shown = await asyncio.to_thread(self._show, body, spans) if spans else body
        for left in reversed(range(_TRIES if spans else 1)):
            is_first = bool(spans)
            has_begun = False
            try:
                async with aclosing(client.generate(shown)) as pieces:
                    async for piece in pieces:
                        if is_first and (piece.token_ids or piece.prompt_ids):
                            _compare(piece, body["token_ids"], spans)
                            is_first = False
                        has_begun = True
                        yield piece
                return
            except (EngineLostError, RequestFailedError):
                if has_begun or not left:
                    raise

    def _show(self, body: dict[str, Any], spans: Sequence[ImageSpan]) -> dict[str, Any]:
        """The body with a file and one placeholder for each image."""
        ids = list[int]()
        parts = list[dict[str, str]]()
        end = 0
        for span in spans:
            try:
                path = Path(self._files.find(span.sha256))
            except (ValueError, OSError) as error:
                raise RequestRefusedError(str(error)) from None
            # the server takes images of one name for the same
            parts.append({"type": "image_url", "url": path.as_uri(), "uuid": span.sha256})
            ids += [*body["token_ids"][end : span.start], self.token_id]
            end = span.start + span.length
        ids += body["token_ids"][end:]
        return body | {"token_ids": ids, "content_parts": parts, "return_token_ids": True}


def _compare(first: StreamDelta, ids: list[int], spans: Sequence[ImageSpan]) -> None:
    """Raises RequestRefusedError if a stream, by its first piece, goes on from other ids or images."""
    wanted = [{"offset": span.start, "length": span.length} for span in spans]
    if (first.prompt_ids, first.images) != (ids, wanted):
        raise RequestRefusedError(
            f"vLLM places the images at {first.images} among {len(first.prompt_ids)} tokens, but the "
            f"request has them at {wanted} among {len(ids)} tokens"
        )


class _Files:
    """The files of images as a server of this host reads them, each verified before it is named: those of
    the run, or copies of them if its storage is remote."""

    def __init__(self, media_dir: str) -> None:
        self._media_dir = media_dir
        self._place = None if is_local(media_dir) else scratch_folder()
        self.folder = self._place.name if self._place else absolute(media_dir)
        self._sizes: OrderedDict[str, int] = OrderedDict()
        """Size of each copy in bytes, by the hash of the image. The most recently used copy is last."""
        self._turn = threading.Lock()

    def find(self, sha256: str) -> str:
        """Path of an image. Raises ValueError, one sentence, if it is missing or broken, or OSError."""
        path = media_file(self.folder, sha256)
        if self._place is None:
            read_image(self._media_dir, sha256)
            return path
        with self._turn:
            if sha256 in self._sizes:
                self._sizes.move_to_end(sha256)
                return path
        png = read_image(self._media_dir, sha256)
        write_atomic(path, png)
        with self._turn:
            self._sizes[sha256] = len(png)
            while sum(self._sizes.values()) > _MOST_COPIES_BYTES and len(self._sizes) > 1:
                Path(media_file(self.folder, self._sizes.popitem(last=False)[0])).unlink()
        return path
