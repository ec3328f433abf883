"""The load of benchmarks/gateway.py: HTTP/1.1 by hand over asyncio sockets, because an SDK costs more CPU
than the gateway it would measure.

Owns connections, conversations and latencies; knows nothing of the server.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import orjson

from benchmarks.emulation.engine import FIRST_ID, NUM_IDS

WARMUP_S = 2.0

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_EVENT = re.compile(rb"data: (\{.*\})\n\n")
_END_OF_HEAD = b"\r\n\r\n"
_END_OF_CHUNKS = b"0\r\n\r\n"


class Connection(asyncio.Protocol):
    """One keep-alive connection, one request at a time."""

    def __init__(self) -> None:
        self.arrivals: list[float] = []
        """Times at which data of the current answer arrived."""
        self._data = bytearray()
        self._answered: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def open(cls, address: tuple[str, int]) -> Connection:
        _, connection = await asyncio.get_running_loop().create_connection(cls, *address)
        return connection

    async def post(self, path: str, body: bytes, key: str = "none") -> tuple[int, bytes]:
        """Status and raw body, with the chunk headers of a stream. Raises ConnectionError."""
        assert self._transport is not None
        self._data.clear()
        self.arrivals = []
        self._answered = asyncio.get_running_loop().create_future()
        head = f"POST {path} HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\n"
        head += f"authorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)
        await self._answered
        end = self._data.index(_END_OF_HEAD)
        return int(self._data[9:12]), bytes(self._data[end + len(_END_OF_HEAD) :])

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # a cast, because uvloop's transport is not asyncio's class
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._data += data
        self.arrivals.append(time.perf_counter())
        if self._answered is not None and not self._answered.done() and self._is_whole():
            self._answered.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(ConnectionError(f"the server closed the connection: {exc}"))

    def _is_whole(self) -> bool:
        end = self._data.find(_END_OF_HEAD)
        if end < 0:
            return False
        if (length := _LENGTH.search(self._data, 0, end)) is not None:
            return len(self._data) >= end + len(_END_OF_HEAD) + int(length[1])
        return self._data.endswith(_END_OF_CHUNKS)


@dataclass(frozen=True, slots=True)
class Load:
    """The sessions that every slot repeats: some turns, each with the whole history."""

    concurrency: int
    max_tokens: int
    turns: int = 5
    """Turns of a session."""
    prompt_tokens: int = 40
    """Tokens of the first message; later messages are one word."""
    logprobs: bool = False


@dataclass(frozen=True, slots=True)
class Target:
    """An OpenAI-compatible server."""

    address: tuple[str, int]
    model: str
    paths: list[str]
    """Paths of the chat endpoint, one per session; reused from the start when they run out."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Keys of the sessions, by path."""

    def key(self, path: str) -> str:
        return self.keys.get(path, "none")


@dataclass(slots=True)
class Measured:
    latencies_s: list[float] = field(default_factory=list)
    """Latencies of turns that began and ended in the measured time."""
    num_done: int = 0
    """Number of turns, the warm-up included."""
    wall_s: float = 0.0
    num_errors: int = 0
    first_error: str = ""

    def error(self, text: str) -> None:
        self.num_errors += 1
        self.first_error = self.first_error or text

    @property
    def per_second(self) -> float:
        return len(self.latencies_s) / self.wall_s

    def quantile_ms(self, share: float) -> float:
        ordered = sorted(self.latencies_s)
        return 1000 * ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else float("nan")


def answer_text(num_tokens: int) -> str:
    """Text of the emulated engine's tokens in the built-in policy's vocabulary, one character each."""
    return "".join(chr(31 + FIRST_ID + i % NUM_IDS) for i in range(num_tokens))


def chat_body(model: str, messages: list[dict[str, str]], max_tokens: int, **more: Any) -> bytes:
    return orjson.dumps({"model": model, "messages": messages, "max_tokens": max_tokens, **more})


def content_of(body: bytes) -> str:
    return str(orjson.loads(body)["choices"][0]["message"]["content"])


def streamed_content(body: bytes) -> str:
    choices = [choice for event in _EVENT.findall(body) for choice in orjson.loads(event).get("choices", ())]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


async def measure(target: Target, load: Load, seconds: float) -> Measured:
    """Keep the target under this load; the first WARMUP_S are not counted."""
    measured = Measured()
    paths = _endless(target.paths)
    begin = time.perf_counter() + WARMUP_S
    end = begin + seconds
    # slots that start together would stay in step and queue behind each other
    offsets = random.Random(0)
    await asyncio.gather(
        *(
            _slot(target, load, paths, measured, begin, end, offsets.random() / 4)
            for _ in range(load.concurrency)
        )
    )
    measured.wall_s = seconds
    return measured


async def _slot(
    target: Target,
    load: Load,
    paths: Iterator[str],
    measured: Measured,
    begin: float,
    end: float,
    offset_s: float,
) -> None:
    await asyncio.sleep(offset_s)
    connection = await Connection.open(target.address)
    session = 0
    while time.perf_counter() < end:
        path = next(paths)
        session = session + 1
        try:
            latencies = await converse(connection, target, load, path, f"{path} {session} ", until=end)
        except (ConnectionError, ValueError, KeyError) as error:
            measured.error(str(error))
            connection.close()
            connection = await Connection.open(target.address)
            continue
        measured.num_done += len(latencies)
        measured.latencies_s += [done - start for start, done in latencies if start >= begin and done <= end]
    connection.close()


async def converse(
    connection: Connection, target: Target, load: Load, path: str, opening: str, until: float = float("inf")
) -> list[tuple[float, float]]:
    """Run one session; returns start and end of each turn. Raises ValueError for a wrong answer."""
    first = (opening + "x" * load.prompt_tokens)[: load.prompt_tokens]
    messages = [{"role": "user", "content": first}]
    options = {"logprobs": True} if load.logprobs else {}
    expected = answer_text(load.max_tokens)
    times = []
    for _ in range(load.turns):
        body = chat_body(target.model, messages, load.max_tokens, **options)
        start = time.perf_counter()
        if start >= until:
            break
        status, answer = await connection.post(path, body, target.key(path))
        times.append((start, time.perf_counter()))
        if status != 200:
            raise ValueError(f"status {status}: {answer[:300].decode(errors='replace')}")
        content = content_of(answer)
        if content != expected:
            raise ValueError(f"expected the text of {load.max_tokens} tokens, got {content[:80]!r}")
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "go on"}]
    return times


def _endless(paths: list[str]) -> Iterator[str]:
    while True:
        yield from paths
