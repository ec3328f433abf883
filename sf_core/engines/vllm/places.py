"""The vLLM server of an engine: its start, the client of it, and its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from sf_core.engines.protocol import EngineLostError
from sf_core.engines.vllm.client import VllmClient
from sf_core.engines.vllm.server import VllmServer

_START_S = 1800.0
"""Longest start of a server."""

_LOOK_EVERY_S = 0.1


class OwnServer:
    """A server that is started here."""

    def __init__(self, model_dir: str, arguments: Sequence[str], *, on_cpu: bool, sleep_level: int) -> None:
        """`arguments`: those of `make_arguments`. `sleep_level`: how the server gives its memory back, as
        vLLM counts; 0: it cannot."""
        self._model_dir = model_dir
        self._arguments = arguments
        self._on_cpu = on_cpu
        self.sleep_level = sleep_level
        self.ends_at_rest = not on_cpu and not sleep_level
        """Whether the server is ended at rest, because it holds memory of a GPU and cannot sleep."""
        self._server: VllmServer | None = None

    async def connect(self) -> tuple[VllmClient, bool]:
        """A client of the server, and whether the server was started for it. Can be cancelled; the start may
        then go on. Raises EngineLostError."""
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
        """Raises EngineLostError if the server has lost its keeper, whatever it answers."""
        if self._server is not None and self._server.has_ended:
            raise EngineLostError("vLLM has ended, or the process that supervises vLLM has failed")

    def leave(self) -> None:
        """End the server, or its start."""
        if self._server is not None:
            self._server.end()
        self._server = None

    def leave_start(self) -> None:
        """A start is not awaited any more: end it if it takes memory of a device."""
        if not self._on_cpu:
            self.leave()

    def last_lines(self) -> str:
        """The end of the server's log."""
        return self._server.last_lines() if self._server else ""

    async def _await_health(self, client: VllmClient, server: VllmServer) -> None:
        give_up_at = time.monotonic() + _START_S
        while not server.has_ended and time.monotonic() < give_up_at:
            if Path(server.socket).exists():
                with suppress(EngineLostError):
                    return await client.check_health()
            await asyncio.sleep(_LOOK_EVERY_S)
        raise EngineLostError(f"vLLM ended, or was not ready after {_START_S:g} s")
