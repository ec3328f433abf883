"""Conversations from small parts, and each as the request of every dialect that can say it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

JSON = dict[str, Any]


@dataclass(frozen=True)
class Call:
    call_id: str
    name: str
    arguments: str
    """As JSON."""


@dataclass(frozen=True)
class Said:
    """One message."""

    role: str
    """As in Chat Completions."""
    parts: tuple[str, ...] = ()
    """One part is a string in Chat, several are a list of them."""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    answers: str = ""
    """Id of the call that a result answers."""

    @property
    def content(self) -> Any:
        if len(self.parts) == 1:
            return self.parts[0]
        return [{"type": "text", "text": text} for text in self.parts] or None


@dataclass(frozen=True)
class Shape:
    """What a request means, whatever its dialect."""

    messages: tuple[Said, ...]
    tools: tuple[JSON, ...] = ()
    """Functions, without the object that Chat puts around them."""
    options: JSON = field(default_factory=dict)
    """`chat_template_kwargs`."""
    effort: str = ""
    """How much the model is asked to think."""
    reasoning_name: str = "reasoning_content"
    """The field that holds reasoning in Chat; vLLM's own is `reasoning`."""

    must_call: bool = False

    def beginning(self, num_messages: int) -> Shape:
        return replace(self, messages=self.messages[:num_messages])


@dataclass(frozen=True)
class Request:
    path: str
    body: JSON


def completion(prompt: str | list[int], **fields: Any) -> Request:
    """A text or token ids that are continued as they are."""
    return Request("/v1/completions", {"model": "policy", "prompt": prompt, **fields})


def chat(shape: Shape) -> Request:
    messages = [_chat_message(said, shape.reasoning_name) for said in shape.messages]
    tools = [{"type": "function", "function": tool} for tool in shape.tools]
    effort = {
        "reasoning_effort": shape.effort or None,
        "tool_choice": "required" if shape.must_call else None,
    }
    return Request("/v1/chat/completions", _body(shape, messages=messages, tools=tools, **effort))


def _chat_message(said: Said, reasoning_name: str) -> JSON:
    message: JSON = {"role": said.role, "content": said.content}
    if said.reasoning:
        message[reasoning_name] = said.reasoning
    if said.calls:
        message["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in said.calls
        ]
    if said.role == "tool":
        message["tool_call_id"] = said.answers
    return message


def messages(shape: Shape) -> Request | None:
    """Anthropic's API: the first system message stands beside the others, results are blocks of a user."""
    if any(said.role == "developer" for said in shape.messages) or not _has_arguments(shape):
        return None
    rest = list(shape.messages)
    system = rest.pop(0).parts if rest[0].role == "system" else ()
    made: list[JSON] = []
    for said in rest:
        blocks = _blocks(said)
        if said.role == "tool" and made and made[-1]["content"][-1:] and _is_results(made[-1]):
            made[-1]["content"] += blocks
        else:
            made.append({"role": "user" if said.role == "tool" else said.role, "content": blocks})
    tools = [_anthropic_tool(tool) for tool in shape.tools]
    given: Any = system[0] if len(system) == 1 else [{"type": "text", "text": text} for text in system]
    thinking = {"none": {"thinking": {"type": "disabled"}}, "": {}}
    effort = thinking.get(shape.effort, {"output_config": {"effort": shape.effort}})
    body = _body(shape, max_tokens=1, system=given, messages=made, tools=tools, **effort)
    return Request("/v1/messages", body)


def _is_results(message: JSON) -> bool:
    return isinstance(message["content"], list) and message["content"][-1]["type"] == "tool_result"


def _blocks(said: Said) -> Any:
    if said.role == "tool":
        return [{"type": "tool_result", "tool_use_id": said.answers, "content": said.content or ""}]
    if len(said.parts) == 1 and not said.reasoning and not said.calls:
        return said.parts[0]
    thought = [{"type": "thinking", "thinking": said.reasoning, "signature": ""}] if said.reasoning else []
    texts = [{"type": "text", "text": text} for text in said.parts]
    calls = [
        {"type": "tool_use", "id": call.call_id, "name": call.name, "input": json.loads(call.arguments)}
        for call in said.calls
    ]
    return [*thought, *texts, *calls]


def _anthropic_tool(tool: JSON) -> JSON:
    made = {name: value for name, value in tool.items() if name in ("name", "description", "strict")}
    return made | {"input_schema": tool.get("parameters", {"type": "object", "properties": {}})}


def responses(shape: Shape) -> Request | None:
    """The first system message is the instructions; an answer is items."""
    rest = list(shape.messages)
    instructions = None
    if rest[0].role == "system" and len(rest[0].parts) == 1:
        instructions = rest.pop(0).parts[0]
    items = [item for at, said in enumerate(rest) for item in _items(said, at)]
    tools = [{"type": "function", **tool} for tool in shape.tools]
    effort = {"reasoning": {"effort": shape.effort} if shape.effort else None}
    body = _body(shape, instructions=instructions, input=items, tools=tools, **effort)
    return Request("/v1/responses", body)


def _items(said: Said, at: int) -> list[JSON]:
    if said.role == "tool":
        output = said.content
        if isinstance(output, list):
            output = [{"type": "input_text", "text": text} for text in said.parts]
        return [{"type": "function_call_output", "call_id": said.answers, "output": output or ""}]
    if said.role != "assistant":
        content = said.content
        if isinstance(content, list):
            content = [{"type": "input_text", "text": text} for text in said.parts]
        return [{"type": "message", "role": said.role, "content": content or ""}]
    items: list[JSON] = []
    if said.reasoning:
        thought = {"content": [{"type": "reasoning_text", "text": said.reasoning}], "summary": []}
        items.append({"type": "reasoning", "id": f"rs_{at}", **thought})
    if said.parts:
        texts = [{"type": "output_text", "text": text, "annotations": []} for text in said.parts]
        message = {"type": "message", "id": f"msg_{at}", "role": "assistant", "status": "completed"}
        items.append({**message, "content": texts})
    for number, call in enumerate(said.calls):
        named = {"call_id": call.call_id, "name": call.name, "arguments": call.arguments}
        items.append({"type": "function_call", "id": f"fc_{at}_{number}", **named})
    return items


def gemini(shape: Shape) -> Request | None:
    """Google's API, which vLLM does not serve."""
    rest = list(shape.messages)
    instruction = rest.pop(0).parts if rest[0].role == "system" else ()
    if not _has_arguments(shape) or {said.role for said in rest} & {"system", "developer"}:
        return None
    if shape.effort or any("strict" in tool for tool in shape.tools):
        return None
    names = {call.call_id: call.name for said in rest for call in said.calls}
    contents: list[JSON] = []
    for said in rest:
        role = "model" if said.role == "assistant" else "user"
        parts: list[JSON] = [{"text": text} for text in said.parts]
        if said.reasoning:
            parts.insert(0, {"text": said.reasoning, "thought": True})
        parts += [
            {"functionCall": {"id": call.call_id, "name": call.name, "args": json.loads(call.arguments)}}
            for call in said.calls
        ]
        if said.role == "tool":
            response = {"output": "\n".join(said.parts)}
            named = {"id": said.answers, "name": names[said.answers], "response": response}
            parts = [{"functionResponse": named}]
        contents.append({"role": role, "parts": parts})
    declared = [_google_tool(tool) for tool in shape.tools]
    given = {"parts": [{"text": text} for text in instruction]} if instruction else None
    tools = [{"functionDeclarations": declared}] if declared else None
    body = _body(shape, systemInstruction=given, contents=contents, tools=tools)
    return Request("/v1beta/models/policy:generateContent", body)


def _google_tool(tool: JSON) -> JSON:
    made = {name: value for name, value in tool.items() if name in ("name", "description")}
    return made | ({"parametersJsonSchema": tool["parameters"]} if "parameters" in tool else {})


def _has_arguments(shape: Shape) -> bool:
    """Whether the arguments of all calls are objects; some dialects have no others."""
    return all(is_object(call.arguments) for said in shape.messages for call in said.calls)


def is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except ValueError:
        return False


def _body(shape: Shape, **fields: Any) -> JSON:
    given = {name: value for name, value in fields.items() if value not in (None, [], ())}
    return {"model": "policy", **given} | ({"chat_template_kwargs": shape.options} if shape.options else {})


WRITERS: dict[str, Callable[[Shape], Request | None]] = {
    "chat": chat,
    "messages": messages,
    "responses": responses,
    "gemini": gemini,
}
ON_VLLM = ("chat", "messages", "responses")
