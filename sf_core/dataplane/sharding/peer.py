"""Frames between two processes of one data plane, over a stream that both have from the start.

Owns the order of frames, and questions with answers. Frames are those of wire.py; MessagePack delimits them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, cast

import msgpack

from sf_core.dataplane.errors import ApiError
from sf_core.engines import wire

MAX_UNREAD_BYTES = 2**30
"""Most bytes of a frame, and most unread bytes: the connection to a slower reader is aborted."""


class Peer(asyncio.Protocol):
    def __init__(self, on_frame: Callable[[str, Any], None], on_lost: Callable[[], None]) -> None:
        self._on_frame, self._on_lost = on_frame, on_lost
        self._unpacker = msgpack.Unpacker(strict_map_key=False, max_buffer_size=MAX_UNREAD_BYTES)
        self._transport: asyncio.Transport | None = None
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()

    def tell(self, kind: str, value: Any) -> None:
        """Send a frame; no effect once the connection is lost."""
        if self._transport is not None:
            self._transport.write(wire.pack(kind, value))
            if self._transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
                self._transport.abort()

    def ask(self, kind: str, value: Any) -> asyncio.Future[Any]:
        """Send a question at once. Awaiting the answer raises ConnectionError if the connection is lost
        before, and ApiError if the other end refuses or fails."""
        number = next(self._numbers)
        question = asyncio.get_running_loop().create_future()
        if self._transport is None:
            question.set_exception(_gone())
        else:
            self._questions[number] = question
            # also when the caller gives up
            question.add_done_callback(lambda _: self._questions.pop(number, None))
            self.tell("ask", [number, kind, value])
        return question

    def answer(self, number: int, value: Any) -> None:
        self.tell("answer", [number, value])

    def refuse(self, number: int, error: ApiError) -> None:
        self.tell("refused", [number, refusal_value(error)])

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # not asyncio's class under uvloop
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._unpacker.feed(data)
        for message in self._unpacker:
            [(kind, value)] = message.items()
            if kind in ("answer", "refused"):
                self._take_answer(kind, *value)
            else:
                self._on_frame(kind, value)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        for question in self._questions.values():
            if not question.done():
                question.set_exception(_gone())
        self._on_lost()

    def _take_answer(self, kind: str, number: int, value: Any) -> None:
        question = self._questions.get(number)
        if question is None or question.done():
            return  # the caller has given up
        if kind == "answer":
            question.set_result(value)
        else:
            question.set_exception(read_refusal(value))


def _gone() -> ConnectionError:
    return ConnectionError("the other process is gone")


def refusal_value(error: ApiError) -> list[Any]:
    return [error.status, error.message, error.code, error.param, error.retry_after_s]


def read_refusal(value: list[Any]) -> ApiError:
    status, message, code, param, retry_after_s = value
    return ApiError(status, message, code=code, param=param, retry_after_s=retry_after_s)
