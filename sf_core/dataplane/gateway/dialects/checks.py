"""The parsing and checks of request bodies that dialects share.

Knows nothing of sessions, engines or sockets. Every check raises ApiError with status 400 and a sentence.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from itertools import groupby
from typing import Any

import msgspec

from sf_core.config.rollout_config import MOST_TOP_K, bound_temperature, bound_top_p
from sf_core.config.unsupported_fields import UNSUPPORTED_FIELDS
from sf_core.dataplane.chat.answer_grammar import Schema
from sf_core.dataplane.chat.json_text import (
    JSON_TYPE_NAMES,
    MAX_DEPTH,
    TooDeepError,
    has_too_many_values,
    json_type_name,
    repair_json,
)
from sf_core.dataplane.chat.messages import CHARACTERS, LeftOut, Message, too_many_values
from sf_core.dataplane.chat.tool_formats import Tool
from sf_core.dataplane.errors import ApiError, WrongField
from sf_core.dataplane.turns.request import ToolChoice
from sf_core.settings import quote
from sf_core.types import Sampling

Body = dict[str, Any]

TEMPLATE_INPUTS = {"messages", "tools", "add_generation_prompt", "continue_final_message"}
"""Variables of a chat template that other fields of the request set."""

MAX_TOOLS = 1024
"""Most tools of a request, and most names of allowed tools. OpenAI accepts 128, Google 512; agents with many
MCP servers send some hundreds."""

MAX_TOOLS_BYTES = 2 * 2**20
"""Most bytes of the tools of a request as JSON: 2 kB per tool, which is more than agents use."""

MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024
"""Most stop strings, and most characters of a stop string: answers are searched for each of them token by
token. OpenAI accepts 4, Google 5."""

MAX_OPTION_BYTES = 2**16
"""Most bytes of `chat_template_kwargs` as JSON: the template is probed with each set of them."""

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Efforts of reasoning that a client may ask for."""


def parse_json(data: bytes, has_ids: bool = False) -> tuple[Any, bool]:
    """The value of a body, and whether characters in it were mended (chat/json_text.py)."""
    if has_too_many_values(data, numbers=not has_ids):
        raise too_many_values("The request body")
    try:
        return repair_json(data)
    except TooDeepError:
        limit = f"at most {MAX_DEPTH} levels of JSON are read"
        raise ApiError(400, f"The request body is nested too deeply: {limit}.") from None
    except ValueError as error:
        raise ApiError(400, f"The request body is not valid JSON: {error}") from None


def parse_object(data: bytes, has_ids: bool = False) -> tuple[Body, bool]:
    """`has_ids`: it may hold any number of numbers."""
    body, was_repaired = parse_json(data, has_ids)
    if not isinstance(body, dict):
        raise ApiError(400, f"The request body must be a JSON object, got {json_type_name(body)}")
    return body, was_repaired


def check_conversation(messages: list[Message], where: str) -> list[Message]:
    """Checks that there are messages, and that each tool result answers a call of the preceding answer."""
    if not messages:
        raise WrongField(where, f"{where} must contain at least one message")
    open_calls: set[str] = set()
    for message in messages:
        if message["role"] == "tool":
            call_id = message.get("tool_call_id")
            if not isinstance(call_id, str) or call_id not in open_calls:
                raise WrongField(
                    where,
                    f"{where}: the tool result for {call_id!r} does not answer a tool call of the "
                    "preceding assistant message",
                )
        elif message["role"] not in ("system", "developer"):
            # system messages may come between a call and its result
            open_calls = {call["id"] for call in message.get("tool_calls", [])}
    return messages


def check_choice(choice: ToolChoice, tools: list[Tool], where: str = "tool_choice") -> ToolChoice:
    if choice.kind == "required" and not tools:
        raise WrongField(where, f"{where} requires a tool call, but the request has no tools")
    if choice.name is not None and choice.name not in {tool["function"]["name"] for tool in tools}:
        raise WrongField(where, f"{where} names the unknown tool {choice.name!r}")
    return choice


def select_tools(tools: list[Tool], names: Collection[Any], where: str) -> list[Tool]:
    """The tools of these names. Raises ApiError if one names no tool."""
    check_count(names, where, MAX_TOOLS, "names of allowed functions")
    known_names = {tool["function"]["name"] for tool in tools}
    if unknown := [quote(name) for name in names if not isinstance(name, str) or name not in known_names]:
        raise WrongField(where, f"{where} allows functions that are not in tools: {', '.join(unknown)}")
    selected = frozenset(names)
    return [tool for tool in tools if tool["function"]["name"] in selected]


def check_count(items: Collection[Any], where: str, limit: int, kind: str) -> None:
    """Raises WrongField for more than `limit` items. `kind` is a plural noun for the items."""
    if len(items) > limit:
        raise WrongField(where, f"{where} must have at most {limit} {kind}, got {len(items)}")


def check_size(value: Any, where: str, limit: int) -> None:
    """Raises WrongField for a value whose JSON has more bytes than `limit`."""
    if (size := len(msgspec.json.encode(value))) > limit:
        raise WrongField(where, f"{where} must have at most {limit} bytes as JSON, got {size}")


def parse_arguments(arguments: Any, left_out: LeftOut) -> dict[str, Any]:
    """Arguments as a mapping, which templates expect and which is equal for two spellings of the same JSON.
    Other values stay in the history for good, so they are left out instead of refused, as in vLLM."""
    if not arguments:
        return {}
    if isinstance(arguments, str):
        left_out.count_arguments(arguments)
        try:
            arguments, was_repaired = repair_json(arguments)
            left_out.kinds += [CHARACTERS] * was_repaired
        except ValueError:
            arguments = None
    if isinstance(arguments, dict):
        return arguments
    left_out.kinds.append("arguments")
    return {}


def function_tool(sent: dict[str, Any]) -> Tool:
    """A function as vLLM shows it to a chat template: without other fields, and with null for absent ones."""
    function = {name: sent.get(name) for name in ("name", "description", "parameters")}
    for name in ("strict", "defer_loading"):
        if sent.get(name) is not None:
            function[name] = sent[name]
    return {"type": "function", "function": function}


def parse_stop(body: Body, name: str = "stop") -> list[str]:
    stop = get_field(body, name, (str, list), [])
    stop = [stop] if isinstance(stop, str) else stop
    check_count(stop, name, MAX_STOPS, "stop strings")
    if not all(isinstance(text, str) and text for text in stop):
        raise WrongField(name, f"{name} must be a non-empty string or a list of such strings")
    if (longest := max(map(len, stop), default=0)) > MAX_STOP_CHARACTERS:
        sentence = f"{name} must have strings of at most {MAX_STOP_CHARACTERS} characters, got {longest}"
        raise WrongField(name, sentence)
    return list(stop)


def positive_int(body: Body, name: str, limit: int | None = None) -> int | None:
    """The field if it is an integer from 1 to `limit`; None if it is absent or null."""
    value = get_field(body, name, (int,), None)
    if value is not None and value < 1:
        raise WrongField(name, f"{name} must be at least 1, got {value}")
    if value is not None and limit is not None and value > limit:
        raise WrongField(name, f"{name} must be at most {limit}, got {value}")
    return None if value is None else int(value)


def number_between(body: Body, name: str, default: float, low: float, high: float) -> float:
    """The field if it is a number from `low` to `high`, the default if it is absent or null."""
    value = get_field(body, name, (int, float), default)
    if not low <= value <= high:
        raise WrongField(name, f"{name} must be between {low:g} and {high:g}, got {value}")
    return float(value)


def get_field(body: Body, name: str, kinds: tuple[type, ...], default: Any) -> Any:
    """The field if it is of one of these JSON types, the default if it is absent or null."""
    value = body.get(name)
    if value is None:
        return default
    # bool is an int in Python but not in JSON
    is_wrong_bool = isinstance(value, bool) and bool not in kinds
    if is_wrong_bool or not isinstance(value, kinds):
        raise WrongField(
            name,
            f"{name} must be {' or '.join(JSON_TYPE_NAMES[k] for k in kinds)}, got {json_type_name(value)}",
        )
    if isinstance(value, int) and value.bit_length() > 64:
        raise WrongField(name, f"{name} must be an integer of at most 64 bits")
    return value


def refuse_unsupported_fields(body: Body, ignored: Collection[str] = (), done: Collection[str] = ()) -> Body:
    """The body without the fields that the run ignores. Raises WrongField for other fields of
    `UNSUPPORTED_FIELDS` with values that would change the answer. `done` are fields that the dialect supports
    all the same."""
    names = sorted(name for outer in _UNSUPPORTED.keys() & body.keys() for name in _UNSUPPORTED[outer])
    for name in names:
        if name in ignored or name in done:
            continue
        harmless_values = UNSUPPORTED_FIELDS[name]
        value = _get_nested_field(body, name)
        if value is not None and value not in harmless_values:
            instead = "".join(f", or make it {json.dumps(harmless)}" for harmless in harmless_values)
            raise WrongField(
                name,
                f"{name} is not supported and would change the answer: leave it out{instead}, or add it to "
                "the run's rollout.ignored_fields.",
            )
    for name in ignored:
        body = _without_field(body, name)
    return body


_UNSUPPORTED = {
    outer: [*names]
    for outer, names in groupby(sorted(UNSUPPORTED_FIELDS), key=lambda name: name.partition(".")[0])
}
"""Names in `UNSUPPORTED_FIELDS` by the field of the body that holds them: a body has few of them."""


def _get_nested_field(body: Body, name: str) -> Any:
    outer, _, inner = name.partition(".")
    value = body.get(outer)
    if not inner:
        return value
    return value.get(inner) if isinstance(value, dict) else None


def _without_field(body: Body, name: str) -> Body:
    """The body without a field, which may be inside another field."""
    outer, _, inner = name.partition(".")
    if inner:
        value = body.get(outer)
        return body | {outer: _without_field(value, inner)} if isinstance(value, dict) else body
    return {field: value for field, value in body.items() if field != name}


def answer_schema(body: Body, *names: str) -> Schema | None:
    """The schema of the answer from the first of these fields that sets one, in the form of OpenAI and
    Anthropic."""
    for name in names:
        answer_format = _get_nested_field(body, name)
        if answer_format is None:
            continue
        if not isinstance(answer_format, dict):
            raise WrongField(name, f"{name} must be an object, got {json_type_name(answer_format)}")
        match answer_format.get("type"):
            case "text":
                continue
            case "json_object":
                return {"type": "object"}
            case "json_schema":
                return _inner_schema(answer_format, name)
        kind = quote(answer_format.get("type"))
        raise WrongField(name, f"{name}.type must be text, json_object or json_schema, got {kind}")
    return None


def _inner_schema(answer_format: Body, name: str) -> Schema:
    # in Chat Completions the schema is a level deeper than in the other APIs
    inner = answer_format.get("json_schema", answer_format)
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if not isinstance(schema, dict | bool):
        raise WrongField(name, f"{name} must contain a JSON Schema, got {json_type_name(schema)}")
    return schema


def has_strict_tool(body: Body) -> bool:
    """Whether calls of some tool must follow its schema, which the data plane does not enforce."""
    for tool in body.get("tools") or ():
        if not isinstance(tool, dict):
            continue
        function = tool.get("function")
        if tool.get("strict") or (isinstance(function, dict) and function.get("strict")):
            return True
    return False


def template_options(body: Body, effort: Any = None) -> dict[str, Any]:
    """Variables of the chat template: `chat_template_kwargs`, and the variables that vLLM sets for an effort
    of reasoning."""
    options: dict[str, Any] = get_field(body, "chat_template_kwargs", (dict,), {})
    if reserved := TEMPLATE_INPUTS & options.keys():
        names = ", ".join(sorted(reserved))
        raise WrongField("chat_template_kwargs", f"chat_template_kwargs must not contain {names}")
    if options:
        check_size(options, "chat_template_kwargs", MAX_OPTION_BYTES)
    if effort is None:
        return options
    if effort not in EFFORTS:
        raise ApiError(400, f"The reasoning effort must be one of {', '.join(EFFORTS)}, got {quote(effort)}")
    return {"enable_thinking": effort != "none"} | options | {"reasoning_effort": effort}


def read_sampling(body: Body, top_k: int | None = None, max_temperature: float = 2.0) -> Sampling:
    """The sampling of a request, within the limits of engines and without the seed. `top_k` is passed by
    dialects with rules of their own for it."""
    top_k = _read_top_k(body) if top_k is None else top_k
    return Sampling(
        bound_temperature(number_between(body, "temperature", 1.0, 0.0, max_temperature)),
        bound_top_p(number_between(body, "top_p", 1.0, 0.0, 1.0)),
        min(top_k, MOST_TOP_K),
    )


def _read_top_k(body: Body) -> int:
    """`top_k` as vLLM's clients send it: 0 and -1 mean no limit."""
    value = get_field(body, "top_k", (int,), 0)
    if value < -1:
        raise WrongField("top_k", f"top_k must be at least -1, got {value}")
    return max(0, int(value))


def refuse_unless(body: Body, name: str, sentence: str, *allowed: Any) -> None:
    """Raises ApiError for a value that is neither null nor among those allowed."""
    if (value := body.get(name)) is not None and value not in allowed:
        raise WrongField(name, sentence)
