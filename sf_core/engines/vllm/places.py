"""Where an engine's vLLM server is from: started here, or adopted by its URL."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from sf_core.engines.protocol import EngineLostError
from sf_core.engines.vllm.client import VllmClient
from sf_core.engines.vllm.policy_folder import PolicyFolder
from sf_core.engines.vllm.server import VllmServer
from sf_core.types import WeightsRef
from storage.files import absolute, is_local

_START_S = 1800.0
"""Longest start of a server."""

_LOOK_EVERY_S = 0.1


class ServerOrigin:
    sleep_level = 0
    """How the server gives its memory back, as vLLM counts; 0: it keeps it."""

    def take(self, weights: WeightsRef, folder: str) -> str:
        """The folder that the server is to read, for weights that are in `folder`. Raises ValueError."""
        raise NotImplementedError

    async def connect(self) -> tuple[VllmClient, bool]:
        """A client of the server, which is started if need be, and whether it holds the weights taken last.
        Can be cancelled; the start may then go on. Raises EngineLostError."""
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

    def __init__(self, policy: PolicyFolder, arguments: Sequence[str], sleep_level: int) -> None:
        """`arguments`: those of `make_arguments`. sleep_level 0: the server computes on the CPU."""
        self._policy, self._arguments, self.sleep_level = policy, arguments, sleep_level
        self._server: VllmServer | None = None

    def take(self, weights: WeightsRef, folder: str) -> str:
        self._policy.take(folder)
        return self._policy.path

    async def connect(self) -> tuple[VllmClient, bool]:
        is_new = self._server is None
        if self._server is None:
            on_cpu = self.sleep_level == 0
            self._server = VllmServer(self._policy.path, self._arguments, on_cpu=on_cpu)
        client = VllmClient(socket=self._server.socket)
        try:
            await self._await_health(client, self._server)
        except BaseException:
            await client.close()
            raise
        return client, is_new

    def check(self) -> None:
        if self._server is not None and self._server.has_ended:
            raise EngineLostError("vLLM has ended, or nobody would end it with this process")

    def leave(self) -> None:
        if self._server is not None:
            self._server.end()
        self._server = None

    def leave_start(self) -> None:
        if self.sleep_level:
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
        raise EngineLostError("vLLM ended, or took too long, before it served")


class AdoptedServer(ServerOrigin):
    """A server that somebody else started, for one engine. It is never ended, nor put to sleep."""

    def __init__(self, url: str, key: str | None, policy: PolicyFolder, context_length: int) -> None:
        self._url, self._key, self._policy = url, key, policy
        self._context_length = context_length

    def take(self, weights: WeightsRef, folder: str) -> str:
        self._policy.take(folder)
        if not is_local(weights.uri):
            raise ValueError(
                f"engine.vllm.url: the server reads weights from a folder, and those of this run are at "
                f"{weights.uri}: storage.root must be a folder that both hosts see"
            )
        return absolute(weights.uri)

    async def connect(self) -> tuple[VllmClient, bool]:
        client = VllmClient(self._url, key=self._key)
        try:
            if fault := self._find_fault(await client.settings()):
                raise ValueError(f"the server at {self._url} {fault}")
        except ValueError as error:
            await client.close()
            raise ValueError(f"engine.vllm.url: {error}") from None
        except BaseException:
            await client.close()
            raise
        return client, False

    def _find_fault(self, settings: dict[str, Any]) -> str | None:
        model = settings["model_config"]
        if model["max_model_len"] < self._context_length:
            return (
                f"has a context of {model['max_model_len']} tokens, and engine.context_length is "
                f"{self._context_length}: start it with --max-model-len {self._context_length}"
            )
        if model["logprobs_mode"] != "processed_logprobs":
            return (
                "reports log-probs that are not those of the sampling distribution: start it with "
                "--logprobs-mode processed_logprobs"
            )
        if settings["device_config"]["device"] == "cpu" and not self._policy.has_head:
            return "computes on the CPU, where vLLM reloads no head that is tied to the embedding"
        return None
