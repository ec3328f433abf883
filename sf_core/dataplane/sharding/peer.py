"""Messages between two processes of one data plane, over a stream that both have from the start.

Owns their order, questions with answers, and work that nobody awaits. A message is its length, and a
MessagePack map of its kind to its values.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import struct
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, cast

import msgspec

from sf_core.dataplane.errors import ApiError

MAX_UNREAD_BYTES = 2**30
"""Most bytes of a message, and most unread bytes: the connection to a slower reader is aborted."""

_LENGTH = struct.Struct("<I")

log = logging.getLogger(__name__)


class Peer(asyncio.Protocol):
    def __init__(
        self, on_lost: Callable[[], None], obey: Callable[..., Awaitable[Any]] | None = None
    ) -> None:
        """`obey` is called with kind and values of every question, and of messages without a handler."""
        self.handlers: dict[str, Callable[..., None]] = {
            "ask": self._take_question,
            "answer": self._take_answer,
        }
        """Functions by the kind of message, called with its values as soon as it arrives."""
        self._on_lost, self._obey = on_lost, obey
        self._unread = bytearray()
        self._transport: asyncio.Transport | None = None
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._gathered: dict[str, list[Any]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def tell(self, kind: str, *values: Any) -> None:
        """Send a message; no effect once the connection is lost."""
        self._flush()
        self._write(kind, values)

    def tell_soon(self, kind: str, value: Any) -> None:
        """Send a value in one message with the others of its kind in this turn of the event loop."""
        if not self._gathered:
            asyncio.get_running_loop().call_soon(self._flush)
        self._gathered.setdefault(kind, []).append(value)

    def ask(self, kind: str, *values: Any) -> asyncio.Future[Any]:
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
            self.tell("ask", number, kind, values)
        return question

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Do something that nobody awaits; an error is logged."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed", task, exc_info=error)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # not asyncio's class under uvloop
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._unread += data
        for message in self._whole_messages():
            [(kind, values)] = message.items()
            if (handler := self.handlers.get(kind)) is not None:
                handler(*values)
            else:
                self.start(self._answer(None, kind, values))

    def _whole_messages(self) -> list[dict[str, Any]]:
        start, messages = 0, []
        while len(self._unread) >= start + _LENGTH.size:
            end = start + _LENGTH.size + _LENGTH.unpack_from(self._unread, start)[0]
            if len(self._unread) < end:
                break
            messages.append(msgspec.msgpack.decode(self._unread[start + _LENGTH.size : end]))
            start = end
        del self._unread[:start]
        return messages

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        for question in self._questions.values():
            if not question.done():
                question.set_exception(_gone())
        self._on_lost()

    def _flush(self) -> None:
        gathered, self._gathered = self._gathered, {}
        for kind, values in gathered.items():
            self._write(kind, values)

    def _write(self, kind: str, values: Any) -> None:
        if self._transport is not None:
            message = msgspec.msgpack.encode({kind: values})
            self._transport.write(_LENGTH.pack(len(message)) + message)
            if self._transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
                self._transport.abort()

    def _take_question(self, number: int, kind: str, values: list[Any]) -> None:
        self.start(self._answer(number, kind, values))

    async def _answer(self, number: int | None, kind: str, values: list[Any]) -> None:
        answer, refusal = None, None
        try:
            assert self._obey is not None, kind
            answer = await self._obey(kind, *values)
        except ApiError as error:
            refusal = error
        except Exception as error:  # whoever asked answers its request with it
            log.exception("%s failed", kind)
            refusal = ApiError(500, f"The data plane failed: {type(error).__name__}.")
        if number is not None:
            self.tell("answer", number, answer, refusal and refusal_value(refusal))

    def _take_answer(self, number: int, answer: Any, refusal: list[Any] | None) -> None:
        question = self._questions.get(number)
        if question is None or question.done():
            return  # the caller has given up
        if refusal is None:
            question.set_result(answer)
        else:
            question.set_exception(read_refusal(refusal))


def _gone() -> ConnectionError:
    return ConnectionError("the other process is gone")


def refusal_value(error: ApiError) -> list[Any]:
    return [error.status, error.message, error.code, error.param, error.retry_after_s]


def read_refusal(value: list[Any]) -> ApiError:
    status, message, code, param, retry_after_s = value
    return ApiError(status, message, code=code, param=param, retry_after_s=retry_after_s)
