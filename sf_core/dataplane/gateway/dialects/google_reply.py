"""Google's dialect, writing answers and errors."""

from __future__ import annotations

from typing import Any

import msgspec

from sf_core.dataplane.chat.answer_parser import Reasoning
from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.gateway.dialects.protocol import data_event
from sf_core.dataplane.turns.answer import Answer, Event, MadeCall, Pieces, TokenLogprob

STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ABORTED",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
}
RETRY_INFO = "type.googleapis.com/google.rpc.RetryInfo"
FINISH_REASONS = {"stop": "STOP", "length": "MAX_TOKENS", "tool_calls": "STOP"}


class GoogleReply:
    """The response. Every event of a stream is a response with parts of candidates.

    Each candidate of an event has a part: google-genai drops an answer in which a candidate has none."""

    def __init__(self, turn_id: str, model: str, num_candidates: int) -> None:
        self._head = {"modelVersion": model, "responseId": turn_id}
        self._num_candidates = num_candidates

    def whole(self, answers: list[Answer]) -> bytes:
        candidates = [
            _candidate(i, _list_events(answer), answer.logprobs) | _describe_end(answer)
            for i, answer in enumerate(answers)
        ]
        return msgspec.json.encode(self._head | {"candidates": candidates, "usageMetadata": _usage(answers)})

    def start(self, num_prompt_tokens: int) -> bytes:
        return self._event([_candidate(i, []) for i in range(self._num_candidates)])

    def piece(self, index: int, pieces: Pieces) -> bytes:
        if not pieces.events and not pieces.logprobs:
            return b""
        return self._event([_candidate(index, pieces.events, pieces.logprobs)])

    def end_turn(self, index: int, answer: Answer) -> bytes:
        return b""

    def end(self, answers: list[Answer]) -> bytes:
        candidates = [_candidate(i, []) | _describe_end(answer) for i, answer in enumerate(answers)]
        return self._event(candidates, usageMetadata=_usage(answers))

    def fail(self, error: ApiError, request_id: str) -> bytes:
        return data_event(describe_error(error))

    def _event(self, candidates: list[dict[str, Any]], **more: Any) -> bytes:
        return data_event({"candidates": candidates} | more | self._head)


def describe_error(error: ApiError) -> dict[str, Any]:
    status = STATUSES.get(error.status, "INTERNAL" if error.status >= 500 else "INVALID_ARGUMENT")
    description: dict[str, Any] = {"code": error.status, "message": error.message, "status": status}
    if error.retry_after_s is not None:
        # gemini-cli reads the delay from the body, not from the header
        description["details"] = [{"@type": RETRY_INFO, "retryDelay": f"{error.retry_after_s}s"}]
    return {"error": description}


def _list_events(answer: Answer) -> list[Event]:
    thought = [Reasoning(answer.reasoning)] if answer.reasoning else []
    return [*thought, *([answer.content] if answer.content else []), *answer.calls]


def _candidate(index: int, events: list[Event], logprobs: list[TokenLogprob] | None = None) -> dict[str, Any]:
    content = {"role": "model", "parts": [_part(event) for event in events or [""]]}
    candidate: dict[str, Any] = {"content": content, "index": index}
    if logprobs is not None:
        chosen = [{"token": text, "logProbability": logprob} for text, _, logprob in logprobs]
        candidate["logprobsResult"] = {"chosenCandidates": chosen}
    return candidate


def _part(event: Event) -> dict[str, Any]:
    if isinstance(event, MadeCall):
        args = msgspec.json.decode(event.arguments)
        return {"functionCall": {"id": event.call_id, "name": event.name, "args": args}}
    if isinstance(event, Reasoning):
        return {"text": event.text, "thought": True}
    return {"text": event}


def _describe_end(answer: Answer) -> dict[str, str]:
    return {"finishReason": FINISH_REASONS[answer.finish_reason]}


def _usage(answers: list[Answer]) -> dict[str, int]:
    # the candidates share one prompt
    prompt = answers[0].num_prompt_tokens
    sampled = sum(answer.num_sampled_tokens for answer in answers)
    return {
        "promptTokenCount": prompt,
        "candidatesTokenCount": sampled,
        "totalTokenCount": prompt + sampled,
    }
