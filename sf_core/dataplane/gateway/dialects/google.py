"""Google's dialect, `generateContent`, parsing.

Fields are read in both spellings that Google takes, `topP` and `top_p`, and named in the second, as its own
package google-genai does. That package sends calls back as they came, but their results without ids.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import msgspec

from sf_core.dataplane.chat.answer_grammar import Schema
from sf_core.dataplane.chat.google_schemas import json_schema, to_snake_case, to_strict_schema
from sf_core.dataplane.chat.json_text import json_type_name
from sf_core.dataplane.chat.messages import (
    IMAGE,
    MEDIA_FIELDS,
    LeftOut,
    Message,
    Part,
    canonical,
    has_media,
    join_result,
    kind_of_media,
    read_media,
    tool_call,
)
from sf_core.dataplane.chat.tool_formats import Tool
from sf_core.dataplane.errors import ApiError, WrongField
from sf_core.dataplane.gateway.dialects.checks import (
    MAX_TOOLS,
    Body,
    check_choice,
    check_conversation,
    check_count,
    function_tool,
    get_field,
    number_between,
    parse_arguments,
    parse_stop,
    positive_int,
    read_sampling,
    refuse_unless,
    select_tools,
    template_options,
)
from sf_core.dataplane.gateway.dialects.google_reply import GoogleReply, describe_error
from sf_core.dataplane.gateway.dialects.protocol import MAX_TURNS, CountRoutes
from sf_core.dataplane.sessions.session import Session
from sf_core.dataplane.turns.request import ToolChoice, TurnRequest

LocatedPart = tuple[dict[str, Any], str]
"""A part of a content, and its path in the request."""

STREAMED = "streamGenerateContent"
ROLES = {"user": "user", "model": "model", "tool": "user", "function": "user"}
MODES = {
    "AUTO": ToolChoice("auto"),
    "VALIDATED": ToolChoice("auto"),
    "ANY": ToolChoice("required"),
    "NONE": ToolChoice("none"),
}

LEFT_OUT = ("google_search", "google_search_retrieval", "url_context", "code_execution")
"""Tools that a provider would run itself: the model is not shown them, and they are counted."""

_PARTS_BESIDE_TEXT = {"model": "function_call", "user": "function_response"}
"""The kind of part that a content may have besides text, by role."""

_PART_ANNOTATIONS = {"thought", "thought_signature", "part_metadata"}
"""Fields that describe a part."""


def _paths(*methods: str) -> tuple[str, ...]:
    """Paths of these methods. google-genai 3.4 asks `v1`, its earlier versions and other clients `v1beta`."""
    return tuple(f"/{api}/models/{{model:path}}:{method}" for api in ("v1", "v1beta") for method in methods)


class Google:
    name = "generate_content"
    paths: tuple[str, ...] = _paths("generateContent", STREAMED)
    count: CountRoutes | None = CountRoutes(_paths("countTokens"), "totalTokens")
    schema_fields = frozenset({"response_mime_type", "response_schema", "response_json_schema"})
    done_fields: frozenset[str] = frozenset()
    has_ids = False
    header: bytes | None = b"x-goog-api-key"
    overflow = (
        "The input token count ({tokens}) exceeds the maximum number of tokens allowed ({most}). "
        "Please shorten the {param}.",
        "contents",
    )

    def read(self, body: Body, path: str) -> Body:
        model, _, method = path.partition("/models/")[2].rpartition(":")
        body = to_snake_case(body)
        # a request to count tokens may contain a whole request
        body = get_field(body, "generate_content_request", (dict,), body)
        config = get_field(body, "generation_config", (dict,), {})
        return {**body, **config, "model": model, "stream": method == STREAMED}

    def parse(self, body: Body, session: Session, is_multimodal: bool = False) -> list[TurnRequest]:
        left_out = LeftOut(is_multimodal)
        tools = _parse_tools(get_field(body, "tools", (list,), []), left_out)
        choice, tools = _parse_choice(body, tools, left_out)
        refuse_unless(
            body,
            "logprobs",
            "logprobs must be 0; response_logprobs gives the log-prob of the sampled token",
            0,
        )
        return [
            TurnRequest(
                messages=_parse_messages(body, left_out),
                tools=tools,
                template_options=template_options(body),
                tool_choice=choice,
                schema=_answer_schema(body),
                stop=parse_stop(body, "stop_sequences"),
                max_tokens=positive_int(body, "max_output_tokens"),
                sampling=read_sampling(body, _read_top_k(body)),
                seed=get_field(body, "seed", (int,), None),
                num_samples=positive_int(body, "candidate_count", MAX_TURNS) or 1,
                stream=get_field(body, "stream", (bool,), False),
                logprobs=get_field(body, "response_logprobs", (bool,), False),
                left_out=left_out,
            )
        ]

    def reply(self, body: Body, turn_id: str, session: Session) -> GoogleReply:
        return GoogleReply(turn_id, body["model"], body.get("candidate_count") or 1)

    def error_body(self, error: ApiError, request_id: str) -> dict[str, Any]:
        return describe_error(error)

    def model_entry(self, model: str) -> dict[str, Any]:
        return {"name": f"models/{model}", "displayName": model}

    def model_list(self, models: list[str]) -> dict[str, Any]:
        return {"models": [self.model_entry(name) for name in models]}


def _read_top_k(body: Body) -> int:
    """A whole number, which google-genai sends with a decimal point."""
    value = number_between(body, "top_k", 0.0, 0.0, 1e9)
    if not value.is_integer():
        raise WrongField("top_k", f"top_k must be a whole number, got {value}")
    return int(value)


def _parse_tools(tools: list[Any], left_out: LeftOut) -> list[Tool]:
    """The functions; kinds of tools that are left out are added to `left_out`."""
    parsed: list[Tool] = []
    check_count(tools, "tools", MAX_TOOLS, "entries")
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        if not isinstance(tool, dict):
            raise WrongField(where, f"{where} must be an object, got {json_type_name(tool)}")
        kinds = {kind for kind, value in tool.items() if value is not None} - {"function_declarations"}
        if unsupported := sorted(kinds.difference(LEFT_OUT)):
            raise WrongField(where, f"{where}: only functions are supported, not {unsupported[0]}")
        left_out.kinds += sorted(kinds)
        declarations = get_field(tool, "function_declarations", (list,), [])
        check_count([*parsed, *declarations], "tools", MAX_TOOLS, "functions")
        for n, declaration in enumerate(declarations):
            parsed.append(_parse_function(declaration, f"{where}.function_declarations[{n}]"))
    return parsed


def _parse_function(declaration: Any, where: str) -> Tool:
    if not isinstance(declaration, dict) or not isinstance(declaration.get("name"), str):
        raise WrongField(where, f"{where} must be a function with a name")
    google_schema = get_field(declaration, "parameters", (dict,), {"type": "object", "properties": {}})
    schema = get_field(declaration, "parameters_json_schema", (dict,), json_schema(google_schema))
    return function_tool(declaration | {"parameters": schema})


def _answer_schema(body: Body) -> Schema | None:
    mime = get_field(body, "response_mime_type", (str,), "text/plain")
    schema = get_field(body, "response_json_schema", (dict, bool), None)
    if schema is None:
        schema = to_strict_schema(json_schema(get_field(body, "response_schema", (dict,), None)))
    if mime == "application/json":
        return {} if schema is None else schema
    if mime != "text/plain" or schema is not None:
        where = "response_mime_type"
        expected = "application/json, where there is a schema, or text/plain"
        raise WrongField(where, f"{where} must be {expected}, got {mime!r}")
    return None


def _parse_choice(body: Body, tools: list[Tool], left_out: LeftOut) -> tuple[ToolChoice, list[Tool]]:
    """The choice, and the tools that the model is shown. The mode VALIDATED counts as left out: it asks that
    calls follow their schemas."""
    where = "function_calling_config"
    config = get_field(get_field(body, "tool_config", (dict,), {}), where, (dict,), {})
    mode = get_field(config, "mode", (str,), "AUTO")
    left_out.kinds += ["strict"] * (mode == "VALIDATED")
    choice = MODES.get(mode)
    if choice is None:
        raise WrongField(where, f"{where}.mode must be one of {', '.join(MODES)}")
    allowed = get_field(config, "allowed_function_names", (list,), [])
    shown = select_tools(tools, allowed, where) if allowed else tools
    if choice.kind == "required" and len(allowed) == 1:
        return ToolChoice("required", allowed[0]), tools
    return check_choice(choice, shown, where), shown


def _parse_messages(body: Body, left_out: LeftOut) -> list[Message]:
    messages: list[Message] = []
    instruction = body.get("system_instruction")
    if instruction is not None:
        texts = _texts(_parts(instruction, "system", "system_instruction"))
        messages += [{"role": "system", "content": canonical(texts)}] if any(texts) else []
    open_calls = _OpenCalls([])
    for role, parts in _parse_contents(get_field(body, "contents", (list,), []), left_out.is_multimodal):
        if role == "model":
            messages.append(_answer(parts, len(messages), left_out))
            open_calls = _OpenCalls(messages[-1].get("tool_calls", []))
        else:
            messages += _results(parts, open_calls, left_out)
            if user_parts := _user_parts(parts, left_out):
                messages.append({"role": "user", "content": canonical(user_parts)})
    if messages and messages[-1]["role"] == "assistant":
        raise ApiError(
            400,
            "The last content must have the role user: the model cannot continue an answer that the "
            "request begins",
        )
    return check_conversation(messages, "contents")


def _parse_contents(contents: list[Any], is_multimodal: bool) -> list[tuple[str, list[LocatedPart]]]:
    """The roles and parts of the turns. Each piece of a streamed answer comes as a content of its own."""
    turns: list[tuple[str, list[LocatedPart]]] = []
    for i, content in enumerate(contents):
        where = f"contents[{i}]"
        sent_role = get_field(content, "role", (str,), "user") if isinstance(content, dict) else "user"
        if (role := ROLES.get(sent_role)) is None:
            raise WrongField(where, f"{where}.role must be one of {', '.join(ROLES)}, got {sent_role!r}")
        parts = _parts(content, role, where, is_multimodal)
        if role == "user" and not parts:
            raise WrongField(where, f"{where}.parts must contain at least one part")
        if role == "model" and turns and turns[-1][0] == role:
            turns[-1][1].extend(parts)
        else:
            turns.append((role, parts))
    return turns


def _parts(content: Any, role: str, where: str, is_multimodal: bool = False) -> list[LocatedPart]:
    """The parts of a content. A model's reasoning gets a kind of its own, `thought`."""
    if not isinstance(content, dict):
        raise WrongField(where, f"{where} must be an object with parts, got {json_type_name(content)}")
    allowed_kinds = {"text", _PARTS_BESIDE_TEXT.get(role)}
    sent_parts = get_field(content, "parts", (list,), [])
    if any(isinstance(part, dict) and "function_response" in part for part in sent_parts):
        allowed_kinds |= set(MEDIA_FIELDS)  # Gemini CLI sends the images of a result beside it
    parts: list[LocatedPart] = []
    for i, part in enumerate(sent_parts):
        at = f"{where}.parts[{i}]"
        if not isinstance(part, dict):
            raise WrongField(at, f"{at} must be an object, got {json_type_name(part)}")
        fields = {
            name: value for name, value in part.items() if value is not None and name not in _PART_ANNOTATIONS
        }
        is_shown_picture = is_multimodal and role == "user" and kind_of_media(fields) == IMAGE
        if len(fields) != 1 or not (is_shown_picture or fields.keys() <= allowed_kinds):
            kinds = " and ".join(fields) or "empty"
            raise WrongField(at, f"{at}: {kinds} parts are not supported for {role}")
        [(kind, value)] = fields.items()
        if not isinstance(value, str if kind == "text" else dict):
            raise WrongField(at, f"{at}.{kind} must not be {json_type_name(value)}")
        is_thought = role == "model" and kind == "text" and part.get("thought")
        parts.append(({"thought": value} if is_thought else fields, at))
    return parts


def _texts(parts: list[LocatedPart], kind: str = "text") -> list[str]:
    return [part[kind] for part, _ in parts if kind in part]


def _user_parts(parts: list[LocatedPart], left_out: LeftOut) -> list[str | Part]:
    """The texts and images of a user's message. Images after a tool result belong to the result."""
    user_parts: list[str | Part] = []
    is_after_result = False
    for part, where in parts:
        is_after_result |= "function_response" in part
        if "text" in part:
            user_parts.append(part["text"])
        elif left_out.is_multimodal and has_media(part) and not is_after_result:
            user_parts.append(read_media(part, where, left_out))
    return user_parts


def _answer(parts: list[LocatedPart], num_before: int, left_out: LeftOut) -> Message:
    """The message of an answer, whose parts are pieces of one text. Calls without ids get new ids, whose
    values do not matter (sessions/conversation_keys.py)."""
    answer: Message = {"role": "assistant", "content": "".join(_texts(parts))}
    if thoughts := _texts(parts, "thought"):
        answer["reasoning_content"] = "".join(thoughts)
    calls: list[dict[str, Any]] = []
    for part, where in parts:
        function_call = part.get("function_call")
        if function_call is not None:
            default_id = f"call_{num_before}.{len(calls)}"
            calls.append(_call(function_call, where, default_id, left_out))
    if calls:
        answer["tool_calls"] = calls
    return answer


def _call(function_call: dict[str, Any], where: str, default_id: str, left_out: LeftOut) -> dict[str, Any]:
    """A call in canonical form, with `default_id` if the request gives no id."""
    if not isinstance(function_call.get("name"), str):
        raise WrongField(where, f"{where}.function_call must have a name")
    arguments = parse_arguments(function_call.get("args"), left_out)
    call_id = get_field(function_call, "id", (str,), "") or default_id
    return tool_call(call_id, function_call["name"], arguments)


_NumberedCall = tuple[int, dict[str, Any]]
"""A call, and its index among the calls of its answer."""


class _OpenCalls:
    """The calls of an answer that have no result so far."""

    def __init__(self, calls: list[dict[str, Any]]) -> None:
        self._by_id: dict[str, deque[_NumberedCall]] = defaultdict(deque)
        self._by_name: dict[str, deque[_NumberedCall]] = defaultdict(deque)
        for index, call in enumerate(calls):
            self._by_id[call["id"]].append((index, call))
            self._by_name[call["function"]["name"]].append((index, call))
        self._answered: set[int] = set()

    def pop(self, name: Any, call_id: str) -> dict[str, Any] | None:
        """The first open call of this id; without an id, the first of this name. None if there is none."""
        candidates = self._by_id.get(call_id) if call_id else self._by_name.get(name)
        while candidates:
            index, call = candidates.popleft()
            if index not in self._answered:
                self._answered.add(index)
                return call
        return None


def _results(parts: list[LocatedPart], open_calls: _OpenCalls, left_out: LeftOut) -> list[Message]:
    """The messages of the tool results in a content. Each gets the media up to the next result."""
    results: list[Message] = []
    content: list[str | Part] = []
    for part, where in parts:
        if (response := part.get("function_response")) is not None:
            results.append(_result(response, where, open_calls))
            content = [results[-1]["content"]]
            media = get_field(response, "parts", (list,), [])
        else:
            media = [part] if has_media(part) else []
        if results or not left_out.is_multimodal:
            content += [read_media(medium, where, left_out) for medium in media]
        if results:
            results[-1]["content"] = join_result(content)
    return results


def _result(function_response: dict[str, Any], where: str, open_calls: _OpenCalls) -> Message:
    name = function_response.get("name")
    call_id = get_field(function_response, "id", (str,), "")
    call = open_calls.pop(name if isinstance(name, str) else None, call_id)
    if call is None:
        sentence = (
            f"{where}: the result of {name!r} does not answer an open call of the model's content before it"
        )
        raise WrongField(where, sentence)
    response = get_field(function_response, "response", (dict,), {})
    is_wrapped = response.keys() in ({"output"}, {"result"})
    [output] = response.values() if is_wrapped else [response]
    content = output if isinstance(output, str) else msgspec.json.encode(output).decode()
    return {"role": "tool", "content": content, "tool_call_id": call["id"]}
