"""Where an engine's vLLM server is from: started here, or adopted by its URL."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from sf_core.engines.protocol import EngineLostError
from sf_core.engines.vllm.client import VllmClient
from sf_core.engines.vllm.deliveries import Delivery
from sf_core.engines.vllm.pictures import Pictures
from sf_core.engines.vllm.server import VllmServer
from sf_core.types import WeightsRef
from storage.files import absolute, is_local

_START_S = 1800.0
"""Longest start of a server."""

_LOOK_EVERY_S = 0.1


class ServerOrigin:
    sleep_level = 0
    """How the server gives its memory back, as vLLM counts; 0: it cannot."""
    ends_at_rest = False
    """Whether the server is ended at rest, because it holds memory of a GPU and cannot sleep."""

    def locate(self, weights: WeightsRef, folder: str) -> str:
        """The folder in which the server finds what is in `folder` here. Raises ValueError."""
        raise NotImplementedError

    async def connect(self) -> tuple[VllmClient, bool]:
        """A client of the server, and whether the server was started for it. Can be cancelled; the start may
        then go on. Raises EngineLostError."""
        raise NotImplementedError

    def check(self) -> None:
        """Raises EngineLostError if the server has lost its keeper, whatever it answers."""

    def leave(self) -> None:
        """End the server, or its start, if it is ours."""

    def leave_start(self) -> None:
        """A start is not awaited any more: end it if it takes memory of a device."""

    def last_lines(self) -> str:
        """The end of the server's log, if it is known here."""
        return ""


class OwnServer(ServerOrigin):
    """A server that is started here."""

    def __init__(self, model_dir: str, arguments: Sequence[str], *, on_cpu: bool, sleep_level: int) -> None:
        """`arguments`: those of `make_arguments`."""
        self._model_dir = model_dir
        self._arguments = arguments
        self._on_cpu = on_cpu
        self.sleep_level = sleep_level
        self.ends_at_rest = not on_cpu and not sleep_level
        self._server: VllmServer | None = None

    def locate(self, weights: WeightsRef, folder: str) -> str:
        return folder

    async def connect(self) -> tuple[VllmClient, bool]:
        is_new = self._server is None
        if self._server is None:
            self._server = VllmServer(self._model_dir, self._arguments, on_cpu=self._on_cpu)
        client = VllmClient(socket=self._server.socket)
        try:
            await self._await_health(client, self._server)
        except BaseException:
            await client.close()
            raise
        return client, is_new

    def check(self) -> None:
        if self._server is not None and self._server.has_ended:
            raise EngineLostError("vLLM has ended, or the process that supervises vLLM has failed")

    def leave(self) -> None:
        if self._server is not None:
            self._server.end()
        self._server = None

    def leave_start(self) -> None:
        if not self._on_cpu:
            self.leave()

    def last_lines(self) -> str:
        return self._server.last_lines() if self._server else ""

    async def _await_health(self, client: VllmClient, server: VllmServer) -> None:
        give_up_at = time.monotonic() + _START_S
        while not server.has_ended and time.monotonic() < give_up_at:
            if Path(server.socket).exists():
                with suppress(EngineLostError):
                    return await client.check_health()
            await asyncio.sleep(_LOOK_EVERY_S)
        raise EngineLostError(f"vLLM ended, or was not ready after {_START_S:g} s")


class AdoptedServer(ServerOrigin):
    """A server that somebody else started, for one engine. It is never ended, nor put to sleep."""

    def __init__(
        self, url: str, key: str | None, delivery: Delivery, context_length: int, pictures: Pictures | None
    ) -> None:
        self._url = url
        self._key = key
        self._delivery = delivery
        self._context_length = context_length
        self._pictures = pictures

    def locate(self, weights: WeightsRef, folder: str) -> str:
        if not is_local(weights.uri):
            raise ValueError(
                "engine.vllm.url: the server reads weights from a folder, but the weights of this run are "
                f"at {weights.uri}: set storage.root to a folder that both hosts can read"
            )
        return absolute(weights.uri)

    async def connect(self) -> tuple[VllmClient, bool]:
        client = VllmClient(self._url, key=self._key)
        try:
            if fault := await self._find_fault(client):
                raise ValueError(f"the server at {self._url} {fault}")
        except ValueError as error:
            await client.close()
            raise ValueError(f"engine.vllm.url: {error}") from None
        except BaseException:
            await client.close()
            raise
        return client, False

    async def _find_fault(self, client: VllmClient) -> str | None:
        settings = await client.settings()
        model = settings["model_config"]
        if model["max_model_len"] < self._context_length:
            return (
                f"has a context of {model['max_model_len']} tokens, but engine.context_length is "
                f"{self._context_length}: start it with --max-model-len {self._context_length}"
            )
        if model["logprobs_mode"] != "processed_logprobs":
            return (
                "reports raw log-probs, not those of the sampling distribution: start it with "
                "--logprobs-mode processed_logprobs"
            )
        if self._pictures is not None and (fault := self._pictures.find_fault(model)):
            return fault
        return await self._delivery.adopt(client, settings)
