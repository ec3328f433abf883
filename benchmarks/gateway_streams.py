"""All agents stream: tokens per second through one data plane, and their CPU cost. A section of
benchmarks/gateway.py.

One engine samples a token for each request at every step and reports it at once. The client stores what it
receives and parses it when the time is over, so that its own cost is not measured; whole answers are compared
with what was sampled.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from benchmarks.gateway_client import Connection, answer_text
from benchmarks.gateway_stand import MODEL, Gateway

PROMPT = "Tell me a long story."

Line = dict[str, Any]

_EVENT = re.compile(rb"data: (\{.*\})\n\n")


@dataclass(frozen=True, slots=True)
class Streaming:
    """How to request a stream in a dialect, and where its events have their text."""

    path: str
    body: Callable[[int], Line]
    """Request for a number of tokens."""
    text: Callable[[Line], str]
    """The text of one event."""


def _of_choices(event: Line, field: Callable[[Line], str | None]) -> str:
    return "".join(field(choice) or "" for choice in event["choices"])


def _of_type(event: Line, kind: str, field: Callable[[Line], str]) -> str:
    return field(event) if event["type"] == kind else ""


MESSAGES = [{"role": "user", "content": PROMPT}]

DIALECTS = {
    "chat": Streaming(
        "chat/completions",
        lambda tokens: {"messages": MESSAGES, "max_tokens": tokens},
        lambda event: _of_choices(event, lambda choice: choice["delta"].get("content")),
    ),
    "completions": Streaming(
        "completions",
        lambda tokens: {"prompt": PROMPT, "max_tokens": tokens},
        lambda event: _of_choices(event, lambda choice: choice["text"]),
    ),
    "messages": Streaming(
        "messages",
        lambda tokens: {"messages": MESSAGES, "max_tokens": tokens},
        lambda event: _of_type(event, "content_block_delta", lambda event: event["delta"]["text"]),
    ),
    "responses": Streaming(
        "responses",
        lambda tokens: {"input": PROMPT, "max_output_tokens": tokens},
        lambda event: _of_type(event, "response.output_text.delta", lambda event: event["delta"]),
    ),
}


async def stream_all(gateway: Gateway, count: int, num_tokens: int, step_ms: float) -> Line:
    """Run all sessions at once, one answer each, in one dialect after the other.

    Per dialect: tokens_per_second; tokens_per_core_second, by the CPU of the data plane, turns begun and
    ended included; events_per_token; gap_ms, between successive arrivals at an agent; answers_wrong.
    """
    line: Line = {"stream_sessions": count, "stream_answer_tokens": num_tokens, "stream_step_ms": step_ms}
    for name, dialect in DIALECTS.items():
        prefix = "stream" if name == "chat" else f"stream_{name}"
        gateway.register(prefix)
        await asyncio.to_thread(gateway.connect, prefix, "e0", step_ms, stepping=True)
        with gateway.sessions(prefix, count) as session_ids:
            figures = await _stream(gateway, session_ids, dialect, num_tokens)
        line |= {f"{prefix}_{key}": value for key, value in figures.items()}
    return line


async def _stream(gateway: Gateway, session_ids: list[str], dialect: Streaming, num_tokens: int) -> Line:
    connections = [await Connection.open(gateway.address) for _ in session_ids]
    body = orjson.dumps({"model": MODEL, "stream": True, **dialect.body(num_tokens)})
    cpu_s = gateway.cpu_s()
    started = time.perf_counter()
    answers = await asyncio.gather(
        *(
            connection.post(f"/sessions/{name}/v1/{dialect.path}", body, gateway.keys[name])
            for connection, name in zip(connections, session_ids, strict=True)
        )
    )
    seconds = time.perf_counter() - started
    cpu_s = gateway.cpu_s() - cpu_s
    # the first and last events carry more than a token
    gaps_s = np.concatenate([np.diff(connection.arrivals[2:-1]) for connection in connections])
    for connection in connections:
        connection.close()
    read = [_read(status, answer, dialect) for status, answer in answers]
    sampled = len(session_ids) * num_tokens
    return {
        "tokens_per_second": round(sampled / seconds),
        "tokens_per_core_second": round(sampled / cpu_s),
        "events_per_token": round(sum(events for _, events in read) / sampled, 3),
        "gap_ms_p50": round(1000 * float(np.quantile(gaps_s, 0.5)), 1),
        "gap_ms_p99": round(1000 * float(np.quantile(gaps_s, 0.99)), 1),
        "answers_wrong": sum(text != answer_text(num_tokens) for text, _ in read),
    }


def _read(status: int, answer: bytes, dialect: Streaming) -> tuple[str, int]:
    """The text, and the number of events that carry some of it."""
    if status != 200:
        raise ValueError(f"status {status}: {answer[:300]!r}")
    texts = [dialect.text(orjson.loads(event)) for event in _EVENT.findall(answer)]
    return "".join(texts), sum(map(bool, texts))
