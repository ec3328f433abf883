"""The common parts of the three OpenAI dialects."""

from __future__ import annotations

import time
from typing import Any

from sf_core.dataplane.chat.tool_formats import Tool
from sf_core.dataplane.errors import ApiError, WrongField
from sf_core.dataplane.gateway.dialects.checks import Body, check_choice, get_field, select_tools
from sf_core.dataplane.gateway.dialects.protocol import CountRoutes, data_event
from sf_core.dataplane.turns.answer import Answer, TokenLogprob
from sf_core.dataplane.turns.request import ToolChoice

DONE = b"data: [DONE]\n\n"
OVERFLOW = (
    "This model's maximum context length is {window} tokens. However, your {param} resulted in {tokens} "
    "tokens. Please reduce the length of the {param}; the answer needs one token at least."
)


class OpenAI:
    count: CountRoutes | None = None
    schema_fields: frozenset[str] = frozenset()
    done_fields: frozenset[str] = frozenset()
    has_ids = False
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


class ChoicesReply:
    """The common parts of the responses of Chat and Completions. All chunks of a stream have the same id and
    time."""

    chunk_kind: str
    """The field `object` of the chunks of a stream."""

    def __init__(self, reply_id: str, body: Body) -> None:
        self._head = {"id": reply_id, "created": int(time.time()), "model": body["model"]}
        self._num_samples = body.get("n") or 1
        stream_options = body.get("stream_options") or {}
        self._include_usage = bool(stream_options.get("include_usage"))

    def end(self, answers: list[Answer]) -> bytes:
        if not self._include_usage:
            return DONE
        return self._chunk([], usage=self._usage(answers)) + DONE

    def fail(self, error: ApiError, request_id: str) -> bytes:
        return data_event(error.body())

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return data_event(self._head | {"object": self.chunk_kind, "choices": choices} | more)

    def _usage(self, answers: list[Answer]) -> dict[str, int]:
        # the samples of a prompt come one after another, and the prompt counts once
        prompt = sum(answer.num_prompt_tokens for answer in answers[:: self._num_samples])
        sampled = sum(answer.num_sampled_tokens for answer in answers)
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def read_choice(body: Body, tools: list[Tool], function_name: Any) -> tuple[ToolChoice, list[Tool]]:
    """The choice, and the tools that the model is shown. A choice of type allowed_tools selects some tools,
    and has a mode. `function_name`: the function that tool_choice names, if it is an object."""
    choice = get_field(body, "tool_choice", (str, dict), "auto")
    parallel = get_field(body, "parallel_tool_calls", (bool,), True)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        # in the Responses API these fields stand beside the type
        allowed = get_field(choice, "allowed_tools", (dict,), choice)
        names = [_name_of_function(tool) for tool in get_field(allowed, "tools", (list,), [])]
        tools = select_tools(tools, names, "tool_choice")
        choice = get_field(allowed, "mode", (str,), "auto")
    if isinstance(choice, dict) and isinstance(function_name, str):
        return check_choice(ToolChoice("required", function_name, parallel), tools), tools
    if choice not in ("auto", "none", "required"):
        raise WrongField("tool_choice", 'tool_choice must be "auto", "none", "required" or name a function')
    return check_choice(ToolChoice(choice, None, parallel), tools), tools


def _name_of_function(tool: Any) -> Any:
    """Name of the function of an allowed tool, as sent; None if it names none."""
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def logprob_entries(entries: list[TokenLogprob]) -> list[dict[str, Any]]:
    return [
        {"token": text, "logprob": logprob, "bytes": list(data), "top_logprobs": []}
        for text, data, logprob in entries
    ]
