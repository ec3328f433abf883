"""Google's dialect, `generateContent`, parsing.

Fields are read in both spellings that Google takes, `topP` and `top_p`, and named in the second, as its own
package google-genai does. That package sends calls back as they came, but their results without ids.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import msgspec

from sf_core.dataplane.chat.answer_grammar import Schema
from sf_core.dataplane.chat.contents import (
    IMAGE,
    MEDIA,
    LeftOut,
    Part,
    canonical,
    has_media,
    join_result,
    kind_of_media,
    read_media,
)
from sf_core.dataplane.chat.google_schemas import exact, json_schema, spell
from sf_core.dataplane.chat.json_text import kind_of
from sf_core.dataplane.chat.messages import Message, tool_call
from sf_core.dataplane.chat.tool_formats import Tool
from sf_core.dataplane.errors import ApiError, WrongField
from sf_core.dataplane.gateway.dialects.checks import (
    MAX_TOOLS,
    Body,
    check_choice,
    check_conversation,
    check_number,
    function_tool,
    get,
    number,
    parse_arguments,
    parse_stop,
    pick_tools,
    positive,
    read_sampling,
    refuse,
    template_options,
)
from sf_core.dataplane.gateway.dialects.google_reply import GoogleReply, describe_error
from sf_core.dataplane.gateway.dialects.protocol import MAX_TURNS, Count
from sf_core.dataplane.sessions.session import Session
from sf_core.dataplane.turns.request import ToolChoice, TurnRequest

Placed = tuple[dict[str, Any], str]
"""A part of a content, and where it stands."""

STREAMED = "streamGenerateContent"
ROLES = {"user": "user", "model": "model", "tool": "user", "function": "user"}
MODES = {
    "AUTO": ToolChoice("auto"),
    "VALIDATED": ToolChoice("auto"),
    "ANY": ToolChoice("required"),
    "NONE": ToolChoice("none"),
}

LEFT_OUT = ("google_search", "google_search_retrieval", "url_context", "code_execution")
"""Tools that a provider would run itself: the model is not told of them, and they are counted."""

_BESIDE_TEXT = {"model": "function_call", "user": "function_response"}
"""What a content may have besides text, by who says it."""

_ABOUT = {"thought", "thought_signature", "part_metadata"}
"""Fields that tell something about a part."""


def _paths(*methods: str) -> tuple[str, ...]:
    """Paths of these methods. google-genai 3.4 asks `v1`, its earlier versions and other clients `v1beta`."""
    return tuple(f"/{api}/models/{{model:path}}:{method}" for api in ("v1", "v1beta") for method in methods)


class Google:
    name = "generate_content"
    paths: tuple[str, ...] = _paths("generateContent", STREAMED)
    count: Count | None = Count(_paths("countTokens"), "totalTokens")
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
        body = spell(body)
        # a count may have a whole request in it
        body = get(body, "generate_content_request", (dict,), body)
        config = get(body, "generation_config", (dict,), {})
        return {**body, **config, "model": model, "stream": method == STREAMED}

    def parse(self, body: Body, session: Session, sees: bool = False) -> list[TurnRequest]:
        left_out = LeftOut(sees)
        tools = _parse_tools(get(body, "tools", (list,), []), left_out)
        choice, tools = _parse_choice(body, tools, left_out)
        refuse(
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
                max_tokens=positive(body, "max_output_tokens"),
                sampling=read_sampling(body, _read_top_k(body)),
                seed=get(body, "seed", (int,), None),
                num_samples=positive(body, "candidate_count", MAX_TURNS) or 1,
                stream=get(body, "stream", (bool,), False),
                logprobs=get(body, "response_logprobs", (bool,), False),
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
    """A whole number, which google-genai sends with a point."""
    value = number(body, "top_k", 0.0, 0.0, 1e9)
    if not value.is_integer():
        raise WrongField("top_k", f"top_k must be a whole number, got {value}")
    return int(value)


def _parse_tools(tools: list[Any], left_out: LeftOut) -> list[Tool]:
    """The functions; kinds of tools that are left out are added to `left_out`."""
    parsed: list[Tool] = []
    check_number(tools, "tools", MAX_TOOLS, "entries")
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        if not isinstance(tool, dict):
            raise WrongField(where, f"{where} must be an object, got {kind_of(tool)}")
        given = {kind for kind, value in tool.items() if value is not None} - {"function_declarations"}
        if other := sorted(given.difference(LEFT_OUT)):
            raise WrongField(where, f"{where}: only functions are supported, not {other[0]}")
        left_out.kinds += sorted(given)
        declarations = get(tool, "function_declarations", (list,), [])
        check_number([*parsed, *declarations], "tools", MAX_TOOLS, "functions")
        for n, declared in enumerate(declarations):
            parsed.append(_parse_function(declared, f"{where}.function_declarations[{n}]"))
    return parsed


def _parse_function(declared: Any, where: str) -> Tool:
    if not isinstance(declared, dict) or not isinstance(declared.get("name"), str):
        raise WrongField(where, f"{where} must be a function with a name")
    given = json_schema(get(declared, "parameters", (dict,), {"type": "object", "properties": {}}))
    schema = get(declared, "parameters_json_schema", (dict,), given)
    return function_tool(declared | {"parameters": schema})


def _answer_schema(body: Body) -> Schema | None:
    mime = get(body, "response_mime_type", (str,), "text/plain")
    schema = get(body, "response_json_schema", (dict, bool), None)
    if schema is None:
        schema = exact(json_schema(get(body, "response_schema", (dict,), None)))
    if mime == "application/json":
        return {} if schema is None else schema
    if mime != "text/plain" or schema is not None:
        where = "response_mime_type"
        expected = "application/json, where there is a schema, or text/plain"
        raise WrongField(where, f"{where} must be {expected}, got {mime!r}")
    return None


def _parse_choice(body: Body, tools: list[Tool], left_out: LeftOut) -> tuple[ToolChoice, list[Tool]]:
    """The choice, and the tools that the model is shown. That calls must follow their schemas is left out."""
    where = "function_calling_config"
    config = get(get(body, "tool_config", (dict,), {}), where, (dict,), {})
    mode = get(config, "mode", (str,), "AUTO")
    left_out.kinds += ["strict"] * (mode == "VALIDATED")
    choice = MODES.get(mode)
    if choice is None:
        raise WrongField(where, f"{where}.mode must be one of {', '.join(MODES)}")
    allowed = get(config, "allowed_function_names", (list,), [])
    shown = pick_tools(tools, allowed, where) if allowed else tools
    if choice.kind == "required" and len(allowed) == 1:
        return ToolChoice("required", allowed[0]), tools
    return check_choice(choice, shown, where), shown


def _parse_messages(body: Body, left_out: LeftOut) -> list[Message]:
    messages: list[Message] = []
    instruction = body.get("system_instruction")
    if instruction is not None:
        found = _texts(_parts(instruction, "system", "system_instruction"))
        messages += [{"role": "system", "content": canonical(found)}] if any(found) else []
    calls = _OpenCalls([])
    for role, parts in _parse_contents(get(body, "contents", (list,), []), left_out.sees):
        if role == "model":
            messages.append(_answer(parts, len(messages), left_out))
            calls = _OpenCalls(messages[-1].get("tool_calls", []))
        else:
            messages += _results(parts, calls, left_out)
            if said := _said(parts, left_out):
                messages.append({"role": "user", "content": canonical(said)})
    if messages and messages[-1]["role"] == "assistant":
        raise ApiError(
            400,
            "The last content must have the role user: the model cannot continue an answer that the "
            "request begins",
        )
    return check_conversation(messages, "contents")


def _parse_contents(contents: list[Any], sees: bool) -> list[tuple[str, list[Placed]]]:
    """The parts that user and model say in turns; the pieces of a streamed answer come as contents each."""
    turns: list[tuple[str, list[Placed]]] = []
    for i, content in enumerate(contents):
        where = f"contents[{i}]"
        given = get(content, "role", (str,), "user") if isinstance(content, dict) else "user"
        if (role := ROLES.get(given)) is None:
            raise WrongField(where, f"{where}.role must be one of {', '.join(ROLES)}, got {given!r}")
        parts = _parts(content, role, where, sees)
        if role == "user" and not parts:
            raise WrongField(where, f"{where}.parts must contain at least one part")
        if role == "model" and turns and turns[-1][0] == role:
            turns[-1][1].extend(parts)
        else:
            turns.append((role, parts))
    return turns


def _parts(content: Any, role: str, where: str, sees: bool = False) -> list[Placed]:
    """The parts of a content. What a model thinks is a part of its own kind, `thought`."""
    if not isinstance(content, dict):
        raise WrongField(where, f"{where} must be an object with parts, got {kind_of(content)}")
    known = {"text", _BESIDE_TEXT.get(role)}
    given_parts = get(content, "parts", (list,), [])
    if any(isinstance(part, dict) and "function_response" in part for part in given_parts):
        known |= set(MEDIA)  # Gemini CLI has the images of a result beside it
    placed: list[Placed] = []
    for i, part in enumerate(given_parts):
        at = f"{where}.parts[{i}]"
        if not isinstance(part, dict):
            raise WrongField(at, f"{at} must be an object, got {kind_of(part)}")
        given = {name: value for name, value in part.items() if value is not None and name not in _ABOUT}
        is_shown = sees and role == "user" and kind_of_media(given) == IMAGE
        if len(given) != 1 or not (is_shown or given.keys() <= known):
            kinds = " and ".join(given) or "empty"
            raise WrongField(at, f"{at}: {kinds} parts are not supported for {role}")
        [(kind, value)] = given.items()
        if not isinstance(value, str if kind == "text" else dict):
            raise WrongField(at, f"{at}.{kind} must not be {kind_of(value)}")
        is_thought = role == "model" and kind == "text" and part.get("thought")
        placed.append(({"thought": value} if is_thought else given, at))
    return placed


def _texts(parts: list[Placed], kind: str = "text") -> list[str]:
    return [part[kind] for part, _ in parts if kind in part]


def _said(parts: list[Placed], left_out: LeftOut) -> list[str | Part]:
    """What a user says and shows: pictures behind a result are its own."""
    said: list[str | Part] = []
    is_behind_result = False
    for part, where in parts:
        is_behind_result |= "function_response" in part
        if "text" in part:
            said.append(part["text"])
        elif left_out.sees and has_media(part) and not is_behind_result:
            said.append(read_media(part, where, left_out))
    return said


def _answer(parts: list[Placed], num_before: int, left_out: LeftOut) -> Message:
    """The message of an answer, whose parts are pieces of one text. Calls without ids get some; which, does
    not matter (sessions/identity.py)."""
    answer: Message = {"role": "assistant", "content": "".join(_texts(parts))}
    if thoughts := _texts(parts, "thought"):
        answer["reasoning_content"] = "".join(thoughts)
    calls: list[dict[str, Any]] = []
    for part, where in parts:
        made = part.get("function_call")
        if made is not None:
            own_id = f"call_{num_before}.{len(calls)}"
            calls.append(_call(made, where, own_id, left_out))
    if calls:
        answer["tool_calls"] = calls
    return answer


def _call(made: dict[str, Any], where: str, own_id: str, left_out: LeftOut) -> dict[str, Any]:
    """A call in canonical form; `own_id` is its id if the request gives none."""
    if not isinstance(made.get("name"), str):
        raise WrongField(where, f"{where}.function_call must have a name")
    arguments = parse_arguments(made.get("args"), left_out)
    call_id = get(made, "id", (str,), "") or own_id
    return tool_call(call_id, made["name"], arguments)


_Numbered = tuple[int, dict[str, Any]]
"""A call, and its place among those of its answer."""


class _OpenCalls:
    """The calls of an answer that have no result so far."""

    def __init__(self, calls: list[dict[str, Any]]) -> None:
        self._by_id: dict[str, deque[_Numbered]] = defaultdict(deque)
        self._by_name: dict[str, deque[_Numbered]] = defaultdict(deque)
        for place, call in enumerate(calls):
            self._by_id[call["id"]].append((place, call))
            self._by_name[call["function"]["name"]].append((place, call))
        self._taken: set[int] = set()

    def take(self, name: Any, call_id: str) -> dict[str, Any] | None:
        """The first of this id; without an id, the first of this name. None if there is none."""
        found = self._by_id.get(call_id) if call_id else self._by_name.get(name)
        while found:
            at, call = found.popleft()
            if at not in self._taken:
                self._taken.add(at)
                return call
        return None


def _results(parts: list[Placed], calls: _OpenCalls, left_out: LeftOut) -> list[Message]:
    """The messages of the results in a content, the last of which has what stands beside them."""
    results: list[Message] = []
    found: list[str | Part] = []
    for part, where in parts:
        if (given := part.get("function_response")) is not None:
            results.append(_result(given, where, calls))
            found = [results[-1]["content"]]
            media = get(given, "parts", (list,), [])
        else:
            media = [part] * has_media(part)
        if results or not left_out.sees:
            found += [read_media(one, where, left_out) for one in media]
        if results:
            results[-1]["content"] = join_result(found)
    return results


def _result(given: dict[str, Any], where: str, calls: _OpenCalls) -> Message:
    name = given.get("name")
    call_id = get(given, "id", (str,), "")
    call = calls.take(name if isinstance(name, str) else None, call_id)
    if call is None:
        said = (
            f"{where}: the result of {name!r} does not answer an open call of the model's content before it"
        )
        raise WrongField(where, said)
    response = get(given, "response", (dict,), {})
    [output] = response.values() if response.keys() in ({"output"}, {"result"}) else [response]
    content = output if isinstance(output, str) else msgspec.json.encode(output).decode()
    return {"role": "tool", "content": content, "tool_call_id": call["id"]}
