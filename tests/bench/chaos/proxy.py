"""A TCP proxy before a server that can be made to fail, to stall or to be late."""

from __future__ import annotations

import asyncio
import threading
from typing import Literal

from tests.bench.waits import patience

Mode = Literal["through", "fails", "stalls", "late"]
MODES: tuple[Mode, ...] = ("fails", "stalls", "late")
"""Modes that are faults."""
LATE_S = 2.0
"""Delay of every piece of data in mode late."""


class Proxy:
    """Listens on loopback in a thread of its own, for as long as the process lives."""

    def __init__(self, target_port: int) -> None:
        self.mode: Mode = "through"
        self.port = 0
        self._target_port = target_port
        is_up = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self._serve(is_up)), daemon=True).start()
        assert is_up.wait(patience())

    async def _serve(self, is_up: threading.Event) -> None:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        is_up.set()
        await server.serve_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, target = await asyncio.open_connection("127.0.0.1", self._target_port)
        await asyncio.gather(self._pump(reader, target), self._pump(there, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(2**16):
                if self.mode == "late":
                    await asyncio.sleep(LATE_S)
                while self.mode == "stalls":
                    await asyncio.sleep(0.05)
                if self.mode == "fails":
                    writer.transport.abort()
                    return
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass  # one of the two has gone; so does the other
        finally:
            writer.close()
