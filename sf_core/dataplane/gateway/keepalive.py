"""Keeps event streams open while nothing is sampled, and ends those that no client reads.

Owns both limits, for every dialect. It sits between server and application and knows nothing of events but
that empty lines may come between them.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Message, Receive, Send

KEEP_ALIVE_S = 10.0
"""A stream that is silent for so long is sent an empty line: proxies and clients close silent streams."""

SLOW_READER_S = 60.0
"""A client that reads nothing of its answer for so long is given up; its tokens wait in memory till then."""

# not a comment, as event streams have them: to google-genai a line that is not empty begins an answer
_LINE: Message = {"type": "http.response.body", "body": b"\n", "more_body": True}


class KeptAlive:
    """`send` and `receive` of one exchange. Must be closed when the exchange is over, however it ended."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._timer: asyncio.TimerHandle | None = None
        self._line: asyncio.Task[None] | None = None
        self._receiver: asyncio.Task[Any] | None = None
        self._last_sent = 0.0
        self._is_sending = False
        self._gave_up = False

    async def send(self, message: Message) -> None:
        """Send a message; it is dropped if the client was given up, as if the client had gone away."""
        if self._gave_up:
            return
        self._is_sending = True
        try:
            async with asyncio.timeout(SLOW_READER_S):
                if self._line is not None:
                    # one at a time, or a line could be sent after the end
                    await self._line
                await self._send(message)
        except TimeoutError:
            return self._give_up()
        finally:
            self._is_sending = False
        loop = asyncio.get_running_loop()
        self._last_sent = loop.time()
        if message["type"] == "http.response.start":
            if _is_event_stream(message):
                self._timer = loop.call_later(KEEP_ALIVE_S, self._tick)
        elif not message.get("more_body"):
            self.close()

    async def receive(self) -> Message:
        if self._gave_up:
            return {"type": "http.disconnect"}
        self._receiver = asyncio.current_task()
        try:
            return await self._receive()
        except asyncio.CancelledError:
            if not self._gave_up or self._receiver is None:
                raise
            self._receiver.uncancel()
            return {"type": "http.disconnect"}
        finally:
            self._receiver = None

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._line is not None:
            self._line.cancel()
            self._line = None

    def _give_up(self) -> None:
        """Show the application a client that went away."""
        self._gave_up = True
        self.close()
        if self._receiver is not None:
            self._receiver.cancel()

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() - self._last_sent >= KEEP_ALIVE_S:
            self._last_sent = loop.time()
            if not self._is_sending and (self._line is None or self._line.done()):
                self._line = asyncio.ensure_future(self._send(_LINE))
        self._timer = loop.call_at(self._last_sent + KEEP_ALIVE_S, self._tick)


def _is_event_stream(message: Message) -> bool:
    kind: bytes = dict(message.get("headers", ())).get(b"content-type", b"")
    return kind.startswith(b"text/event-stream")
