"""Keeps event streams open while nothing is sampled, and ends streams that no client reads.

Owns both time limits, for every dialect. It sits between server and application, and of events it knows only
that empty lines may come between them.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Message, Receive, Send

KEEP_ALIVE_S = 10.0
"""Seconds of silence after which a stream is sent an empty line: proxies and clients close silent streams."""

SLOW_READER_S = 60.0
"""Seconds after which a client that reads nothing of its answer is given up. Its tokens wait in memory until
then."""

# empty, not a comment as usual in event streams: for google-genai any other line begins an answer
_EMPTY_LINE: Message = {"type": "http.response.body", "body": b"\n", "more_body": True}


class KeepAliveExchange:
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
                    # otherwise the empty line could be sent after the end of the stream
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
        """Make the client appear gone to the application."""
        self._gave_up = True
        self.close()
        if self._receiver is not None:
            self._receiver.cancel()

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() - self._last_sent >= KEEP_ALIVE_S:
            self._last_sent = loop.time()
            if not self._is_sending and (self._line is None or self._line.done()):
                self._line = asyncio.ensure_future(self._send(_EMPTY_LINE))
        self._timer = loop.call_at(self._last_sent + KEEP_ALIVE_S, self._tick)


def _is_event_stream(message: Message) -> bool:
    kind: bytes = dict(message.get("headers", ())).get(b"content-type", b"")
    return kind.startswith(b"text/event-stream")
