"""What the three OpenAI dialects share."""

from __future__ import annotations

from typing import Any

from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.gateway.dialects.checks import Body
from sf_core.dataplane.gateway.dialects.protocol import Count
from sf_core.dataplane.turns.answer import Answer, TokenLogprob

DONE = b"data: [DONE]\n\n"
OVERFLOW = (
    "This model's maximum context length is {window} tokens. However, your {param} resulted in {tokens} "
    "tokens. Please reduce the length of the {param}; the answer needs one token at least."
)


class OpenAI:
    count: Count | None = None
    schema_fields: frozenset[str] = frozenset()
    header: bytes | None = None
    overflow = OVERFLOW, "messages"

    def read(self, body: Body, path: str) -> Body:
        return body

    def error_body(self, error: ApiError, request_id: str) -> dict[str, Any]:
        return error.body()

    def model_entry(self, model: str) -> dict[str, Any]:
        return {"id": model, "object": "model", "created": 0, "owned_by": "seamlessflow"}

    def model_list(self, models: list[str]) -> dict[str, Any]:
        return {"object": "list", "data": [self.model_entry(name) for name in models]}


def usage(answers: list[Answer], num_prompt_tokens: int) -> dict[str, int]:
    sampled = sum(answer.num_sampled_tokens for answer in answers)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": num_prompt_tokens + sampled,
    }


def logprob_entries(entries: list[TokenLogprob]) -> list[dict[str, Any]]:
    return [
        {"token": text, "logprob": logprob, "bytes": list(data), "top_logprobs": []}
        for text, data, logprob in entries
    ]
