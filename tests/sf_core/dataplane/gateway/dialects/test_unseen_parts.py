"""Parts of tool results that are no text do not end a session."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from sf_core.config import RunConfig
from sf_core.dataplane.chat.renderer import Renderer
from tests.bench.dataplane.planes import ServedPlane, answering
from tests.sf_core.dataplane.gateway.dialects.asking import ask

TEXT = {"type": "text", "text": "seen"}
SOURCE = {"type": "base64", "media_type": "image/png", "data": "AA=="}
HI = {"role": "user", "content": "hi"}


def chat(parts: list[Any]) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    return {"messages": [HI, called, {"role": "tool", "tool_call_id": "c", "content": parts}]}


def messages(parts: list[Any]) -> dict[str, Any]:
    called = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]}
    result = {"type": "tool_result", "tool_use_id": "c", "content": parts}
    return {"max_tokens": 8, "messages": [HI, called, {"role": "user", "content": [result]}]}


def responses(parts: list[Any]) -> dict[str, Any]:
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    return {"input": [HI, call, {"type": "function_call_output", "call_id": "c", "output": parts}]}


def google(parts: list[Any], beside: list[Any]) -> dict[str, Any]:
    called = {"role": "model", "parts": [{"functionCall": {"name": "look", "args": {}}}]}
    given = {"name": "look", "response": {"output": "seen"}, "parts": parts}
    asked = {"role": "user", "parts": [{"text": "hi"}]}
    return {"contents": [asked, called, {"role": "user", "parts": [{"functionResponse": given}, *beside]}]}


def media(mime: str, name: str = "inlineData") -> dict[str, Any]:
    return {name: {"mimeType": mime, "data": "AA=="}}


CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
GOOGLE = "/v1/models/policy:generateContent"
CASES = [
    (CHAT, chat([TEXT, {"type": "image_url", "image_url": {"url": "data:"}}]), ["image"]),
    (CHAT, chat([TEXT, {"type": "file", "file": {}}, {"type": "input_audio"}]), ["document", "audio"]),
    (CHAT, chat([TEXT, {"type": "x" * 1000}, 5, None]), ["part", "part", "part"]),
    (MESSAGES, messages([TEXT, {"type": "image", "source": SOURCE}]), ["image"]),
    (MESSAGES, messages([TEXT, {"type": "document", "source": SOURCE}]), ["document"]),
    (
        MESSAGES,
        messages([TEXT, {"type": "tool_reference", "tool_name": "x"}, {"type": "search_result"}]),
        ["tool_reference", "search_result"],
    ),
    (
        RESPONSES,
        responses([TEXT, {"type": "input_image", "image_url": "data:"}, {"type": "input_file"}]),
        ["image", "document"],
    ),
    (GOOGLE, google([media("image/png"), {}], [media("video/mp4", "fileData")]), ["image", "part", "video"]),
    (GOOGLE, google([], [media("application/pdf")]), ["document"]),
]


def left_out(plane: ServedPlane) -> dict[str, int]:
    counters = plane.get("/runs/run")["counters"]
    return {name: number for name, number in counters.items() if name.startswith("left_out.")}


@pytest.mark.parametrize(("path", "body", "kinds"), CASES)
def test_a_sentence_stands_in_their_place(
    served_plane: ServedPlane, renderer: Renderer, path: str, body: dict[str, Any], kinds: list[str]
) -> None:
    served_plane.register()
    served_plane.connect(answering(renderer, "yes"))
    status, answer = ask(served_plane, path, body)
    assert status == 200, answer
    shown = "\n".join(["seen", *(f"[{kind.replace('_', ' ')} left out]" for kind in kinds)])
    [asked] = served_plane.asked
    assert shown in renderer.decode_with_special(list(asked.prompt_ids))
    assert left_out(served_plane) == {f"left_out.{kind}": kinds.count(kind) for kind in kinds}


@pytest.mark.parametrize(("path", "body", "kinds"), CASES)
def test_a_run_may_refuse_them(
    served_plane: ServedPlane, path: str, body: dict[str, Any], kinds: list[str]
) -> None:
    served_plane.register(unseen_parts="refuse")
    status, answer = ask(served_plane, path, body)
    assert status == 400 and "rollout.unseen_parts" in answer["error"]["message"]
    assert left_out(served_plane) == {}
    assert RunConfig.model_validate({"rollout": {"unseen_parts": "refuse"}}).rollout.unseen_parts == "refuse"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": ""}}]}]},
        ),
        (MESSAGES, {"max_tokens": 8, "messages": [{"role": "user", "content": [{"type": "image"}]}]}),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
        (GOOGLE, {"contents": [{"role": "user", "parts": [media("image/png")]}]}),
    ],
)
def test_in_a_users_message_they_are_refused(
    served_plane: ServedPlane, path: str, body: dict[str, Any]
) -> None:
    served_plane.register()
    assert ask(served_plane, path, body)[0] == 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat([{"type": "text", "text": "\ud83d"}])),
        (MESSAGES, messages([{"type": "text", "text": "\ud83d", "\ud83d": 1}])),
        (RESPONSES, responses([{"type": "input_text", "text": "\ud83d"}])),
        (GOOGLE, {"contents": [{"role": "user", "parts": [{"text": "\ud83d"}]}]}),
        ("/v1/completions", {"prompt": "\ud83d"}),
    ],
)
def test_a_character_that_a_client_cut_is_mended_and_counted(
    served_plane: ServedPlane, renderer: Renderer, path: str, body: dict[str, Any]
) -> None:
    served_plane.register()
    served_plane.connect(answering(renderer, "yes"))
    sent = json.dumps({"model": "policy", **body})
    assert httpx.post(served_plane.url + path, content=sent).status_code == 200
    assert "\ufffd" in renderer.decode_with_special(list(served_plane.asked[0].prompt_ids))
    assert left_out(served_plane) == {"left_out.characters": 1}
