"""Images as clients of each dialect send them."""

from __future__ import annotations

import io
from base64 import b64encode
from collections.abc import Mapping
from typing import Any

from PIL import Image

Fields = Mapping[str, Any]
HI = {"role": "user", "content": "hi"}
LOOK = {"type": "text", "text": "look"}
ADDRESS = "https://example.com/a.png"


def png(color: Any = "red", size: tuple[int, int] = (56, 28), mode: str = "RGB", kind: str = "PNG") -> bytes:
    """The file of an image of this colour, width and height."""
    file = io.BytesIO()
    Image.new(mode, size, color).save(file, kind)
    return file.getvalue()


def encoded(image: bytes) -> str:
    return b64encode(image).decode()


def url_of(data: str) -> str:
    return f"data:image/png;base64,{data}"


def show_in_chat(data: str = "", url: str | None = None) -> list[Fields]:
    """A user's message, and a tool's result, that show this image."""
    parts = [LOOK, {"type": "image_url", "image_url": {"url": url_of(data) if url is None else url}}]
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    return [
        {"messages": [{"role": "user", "content": parts}]},
        {"messages": [HI, called, {"role": "tool", "tool_call_id": "c", "content": parts}]},
    ]


def show_in_messages(data: str = "", source: Fields | None = None) -> list[Fields]:
    given = source or {"type": "base64", "media_type": "image/png", "data": data}
    blocks = [LOOK, {"type": "image", "source": given}]
    called = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]}
    result = {"type": "tool_result", "tool_use_id": "c", "content": blocks}
    return [
        {"messages": [{"role": "user", "content": blocks}]},
        {"messages": [HI, called, {"role": "user", "content": [result]}]},
    ]


def show_in_responses(data: str = "", held: Fields | None = None) -> list[Fields]:
    parts = [LOOK | {"type": "input_text"}, {"type": "input_image", **(held or {"image_url": url_of(data)})}]
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    return [
        {"input": [{"role": "user", "content": parts}]},
        {"input": [HI, call, {"type": "function_call_output", "call_id": "c", "output": parts}]},
    ]


def show_in_google(data: str = "", part: Fields | None = None) -> list[Fields]:
    """Also beside a tool's result."""
    shown = part or {"inline_data": {"mime_type": "image/png", "data": data}}
    asked = {"role": "user", "parts": [{"text": "hi"}]}
    called = {"role": "model", "parts": [{"function_call": {"name": "look", "args": {}}}]}
    result = {"name": "look", "response": {"output": "look"}}
    within = [{"function_response": {**result, "parts": [shown]}}]
    beside = [{"function_response": result}, shown]
    return [
        {"contents": [{"role": "user", "parts": [{"text": "look"}, shown]}]},
        *({"contents": [asked, called, {"role": "user", "parts": parts}]} for parts in (within, beside)),
    ]
