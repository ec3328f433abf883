"""The OpenAI Responses dialect, replying: items, whole or as the events the `openai` package expects."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from sf_core.dataplane.chat.answer_parser import Reasoning
from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.gateway.dialects.checks import Body
from sf_core.dataplane.gateway.dialects.openai import logprob_entries
from sf_core.dataplane.gateway.dialects.protocol import encode_event
from sf_core.dataplane.turns.answer import Answer, MadeCall, Pieces, TokenLogprob

ECHOED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "store": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "truncation": "disabled",
}
"""Fields of a request that its response repeats, and their defaults."""


CODES = {429: "rate_limit_exceeded", 503: "server_is_overloaded"}
"""Codes of failed responses after which clients retry, by status."""


class ResponsesReply:
    def __init__(self, turn_id: str, body: Body, response_id: str) -> None:
        self._turn_id = turn_id
        echoed = {name: body[name] for name in ECHOED if body.get(name) is not None}
        self._head = {
            "id": response_id,
            "object": "response",
            "created_at": int(time.time()),
            "model": body["model"],
            "error": None,
            "incomplete_details": None,
            **ECHOED,
            **echoed,
        }
        self._num_events = 0
        self._items: list[dict[str, Any]] = []
        self._open_type: str | None = None
        """Type of the last item while it is being sent."""
        self._logprobs: list[dict[str, Any]] = []
        """Log-probs of tokens since the last text was sent: a token may end inside a character, or begin a
        call."""

    def whole(self, answers: list[Answer]) -> bytes:
        [answer] = answers
        status = "completed" if answer.calls else _status(answer)
        if answer.reasoning:
            reasoning_status = "completed" if answer.content else status
            self._items.append(self._text_item("reasoning", answer.reasoning, reasoning_status))
        if answer.content or not answer.calls:
            self._items.append(self._text_item("message", answer.content, status, answer.logprobs))
        for call in answer.calls:
            self._items.append(self._call_item(call))
        return msgspec.json.encode(self._make_response(answer))

    def start(self, num_prompt_tokens: int) -> bytes:
        response = self._head | {"status": "in_progress", "output": [], "usage": None}
        return b"".join(
            self._event(kind, response=response) for kind in ("response.created", "response.in_progress")
        )

    def piece(self, index: int, pieces: Pieces) -> bytes:
        data = b""
        self._logprobs += logprob_entries(pieces.logprobs or [])
        for event in pieces.events:
            if isinstance(event, MadeCall):
                data += self._end_item() + self._send_call(event)
            elif isinstance(event, Reasoning):
                data += self._begin_item("reasoning") + self._send_text("reasoning_text", event.text)
            else:
                data += self._begin_item("message")
                data += self._send_text("output_text", event, logprobs=self._take_logprobs())
        return data

    def end_turn(self, index: int, answer: Answer) -> bytes:
        status = _status(answer)
        data = self._end_item(status)
        if not answer.content and not answer.calls:
            # an answer without text needs an item too, because the client sends items back
            data += self._begin_item("message") + self._end_item(status)
        texts = [item["content"][0] for item in self._items if item["type"] == "message"]
        if texts:
            # log-probs of tokens after the last text appear in the final response only
            texts[-1]["logprobs"] += self._take_logprobs()
        return data

    def end(self, answers: list[Answer]) -> bytes:
        response = self._make_response(answers[0])
        return self._event(f"response.{response['status']}", response=response)

    def fail(self, error: ApiError, request_id: str) -> bytes:
        # the openai package raises at the event `error`; Codex reads only `response.failed`
        error_event = self._event(
            "error", code=error.code, message=error.message, param=error.param, error=error.body()["error"]
        )
        code = error.code or "server_error"
        if error.retry_after_s is not None:
            code = CODES.get(error.status, code)
        cause = {"code": code, "message": error.message}
        failed = {"status": "failed", "error": cause, "output": self._items, "usage": None}
        return error_event + self._event("response.failed", response=self._head | failed)

    def _make_response(self, answer: Answer) -> dict[str, Any]:
        sampled = answer.num_sampled_tokens
        status = _status(answer)
        return self._head | {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": self._items,
            "usage": {
                "input_tokens": answer.num_prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": answer.num_prompt_tokens + sampled,
            },
        }

    # --- items

    def _text_item(
        self, kind: str, text: str, status: str, logprobs: list[TokenLogprob] | None = None
    ) -> dict[str, Any]:
        part = _part(kind, text)
        if logprobs is not None:
            part["logprobs"] = logprob_entries(logprobs)
        item_id = self._item_id("rs" if kind == "reasoning" else "msg")
        own: dict[str, Any] = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
        return {"id": item_id, "type": kind, **own, "content": [part], "status": status}

    def _call_item(self, call: MadeCall) -> dict[str, Any]:
        return {
            "id": self._item_id("fc"),
            "type": "function_call",
            "call_id": call.call_id,
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }

    def _item_id(self, kind: str) -> str:
        return f"{kind}_{self._turn_id}.{len(self._items)}"

    # --- events

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._num_events += 1
        return encode_event({"type": kind, "sequence_number": self._num_events - 1, **fields})

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        item = self._items[-1]
        return self._event(kind, item_id=item["id"], output_index=len(self._items) - 1, **fields)

    def _show_item(self, stage: str, item: dict[str, Any]) -> bytes:
        """The event that the last item is added or done."""
        return self._event(f"response.output_item.{stage}", output_index=len(self._items) - 1, item=item)

    def _begin_item(self, kind: str) -> bytes:
        if self._open_type == kind:
            return b""
        end_of_previous = self._end_item()
        self._open_type = kind
        item = self._text_item(kind, "", "in_progress")
        self._items.append(item)
        added = self._show_item("added", item | {"content": []})
        part = self._item_event("response.content_part.added", content_index=0, part=_part(kind, ""))
        return end_of_previous + added + part

    def _send_text(self, kind: str, text: str, **fields: Any) -> bytes:
        part = self._items[-1]["content"][0]
        part["text"] += text
        part.get("logprobs", []).extend(fields.get("logprobs", []))
        return self._item_event(f"response.{kind}.delta", content_index=0, delta=text, **fields)

    def _take_logprobs(self) -> list[dict[str, Any]]:
        logprobs = self._logprobs
        self._logprobs = []
        return logprobs

    def _end_item(self, status: str = "completed") -> bytes:
        if self._open_type is None:
            return b""
        item = self._items[-1]
        kind = self._open_type
        self._open_type = None
        item["status"] = status
        part = item["content"][0]
        logprobs = {}
        if kind == "message":
            part["logprobs"] += self._take_logprobs()
            logprobs = {"logprobs": part["logprobs"]}
        done = f"response.{part['type']}.done"
        data = self._item_event(done, content_index=0, text=part["text"], **logprobs)
        data += self._item_event("response.content_part.done", content_index=0, part=part)
        return data + self._show_item("done", item)

    def _send_call(self, call: MadeCall) -> bytes:
        item = self._call_item(call)
        self._items.append(item)
        data = self._show_item("added", item | {"arguments": "", "status": "in_progress"})
        data += self._item_event("response.function_call_arguments.delta", delta=call.arguments)
        done = "response.function_call_arguments.done"
        data += self._item_event(done, name=call.name, arguments=call.arguments)
        return data + self._show_item("done", item)


def _status(answer: Answer) -> str:
    """Status of the response, and of its last item. Calls are always completed."""
    return "incomplete" if answer.finish_reason == "length" else "completed"


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
