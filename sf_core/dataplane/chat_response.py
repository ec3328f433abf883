"""The OpenAI Chat Completions dialect, outwards: a sampled answer -> response bodies and stream events."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson

from sf_core.dataplane.messages import Message

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished turn as the agent gets it."""

    message: Message
    finish_reason: str
    num_prompt_tokens: int
    num_sampled_tokens: int
    logprobs: list[dict[str, Any]] | None


def token_logprobs(
    ids: list[int], logprobs: list[float], decode: Callable[[list[int]], str]
) -> list[dict[str, Any]]:
    entries = []
    for token, logprob in zip(ids, logprobs, strict=True):
        text = decode([token])
        entries.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
    return entries


@dataclass(slots=True)
class ChatResponse:
    """Bodies of one response; all parts of a stream share id and time."""

    response_id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, answer: Answer) -> bytes:
        message = {**_outward(answer.message), "refusal": None}
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": answer.finish_reason,
            "logprobs": _logprobs(answer.logprobs),
        }
        return orjson.dumps(self._head("chat.completion") | {"choices": [choice], "usage": _usage(answer)})

    def delta(self, delta: dict[str, Any], finish_reason: str | None = None, logprobs: Any = None) -> bytes:
        choice = {
            "index": 0,
            "delta": delta,
            "finish_reason": finish_reason,
            "logprobs": _logprobs(logprobs),
        }
        return _event(self._head("chat.completion.chunk") | {"choices": [choice]})

    def call_delta(self, call: dict[str, Any], index: int) -> bytes:
        return self.delta({"tool_calls": [{"index": index, **_call_outward(call)}]})

    def usage(self, answer: Answer) -> bytes:
        return _event(self._head("chat.completion.chunk") | {"choices": [], "usage": _usage(answer)})

    def error(self, body: dict[str, Any]) -> bytes:
        return _event(body)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.response_id, "object": kind, "created": self.created, "model": self.model}


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


def _logprobs(entries: list[dict[str, Any]] | None) -> dict[str, Any] | None:
    return None if entries is None else {"content": entries, "refusal": None}


def _usage(answer: Answer) -> dict[str, int]:
    return {
        "prompt_tokens": answer.num_prompt_tokens,
        "completion_tokens": answer.num_sampled_tokens,
        "total_tokens": answer.num_prompt_tokens + answer.num_sampled_tokens,
    }


def _outward(message: Message) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return {"role": "assistant", "content": message["content"]}
    return {
        "role": "assistant",
        "content": message["content"] or None,
        "tool_calls": [_call_outward(call) for call in calls],
    }


def _call_outward(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = orjson.dumps(function["arguments"]).decode()
    return {**call, "function": {"name": function["name"], "arguments": arguments}}
