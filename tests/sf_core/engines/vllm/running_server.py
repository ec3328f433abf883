"""The seam by which an engine is given a vLLM server that is there already."""

from __future__ import annotations

from sf_core.engines.vllm.client import VllmClient
from sf_core.engines.vllm.server import EngineServer


class RunningServer(EngineServer):
    """A server at a URL or a Unix socket, which is not ended."""

    def __init__(self, *, url: str = "http://vllm", socket: str | None = None) -> None:
        super().__init__("", [], on_cpu=True, sleep_level=0)
        self._url = url
        self._socket = socket

    async def connect(self) -> tuple[VllmClient, bool]:
        return VllmClient(self._url, socket=self._socket), False
