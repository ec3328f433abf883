"""Model families with other formats of tool calls, as seen by an agent that does not know them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from sf_core.dataplane.chat.renderer import Renderer
from tests.bench.dataplane import planes
from tests.bench.dataplane.tools import make_special
from tests.bench.waits import patience

HI: Any = [{"role": "user", "content": "hi"}]
CALC_CHOICE: Any = {"type": "function", "function": {"name": "calc"}}


def serve_family(
    plane: planes.ServedPlane, folder: Path, tool_format: str = "", *, special: bool = False, more: str = ""
) -> Renderer:
    """Serve a policy whose folder names this format, with `more` in its template. `special`: the marks are
    special tokens."""
    shutil.copytree(plane.model_dir, folder)
    config = folder / "tokenizer_config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text(encoding="utf-8")) | {"tool_format": tool_format}),
        encoding="utf-8",
    )
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text(encoding="utf-8") + more, encoding="utf-8")
    if special:
        make_special(folder / "tokenizer.json")
    plane.model_dir = str(folder)
    plane.register(max_tokens=256)
    return Renderer(str(folder))


FAMILIES = [
    (
        "llama3_json",
        '<|python_tag|>{"name": "calc", "parameters": {"expression": "1+1"}}',
        ' {"expression": "1+1"}}',
    ),
    ("plain", "<tool_call>calc 1+1</tool_call>", "1+1</tool_call>"),
    (
        "hermes",
        '<tool_call>\n{"name": "calc", "arguments": {"expression": "1+1"}}\n</tool_call>',
        ' {"expression": "1+1"}}\n</tool_call>',
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=calc>\n<parameter=expression>\n1+1\n</parameter>\n</function>\n</tool_call>",
        "<parameter=expression>\n1+1\n</parameter>\n</function>\n</tool_call>",
    ),
    (
        "glm45",
        "<tool_call>calc\n<arg_key>expression</arg_key>\n<arg_value>1+1</arg_value>\n</tool_call>",
        "<arg_key>expression</arg_key>\n<arg_value>1+1</arg_value>\n</tool_call>",
    ),
    ("mistral", '[TOOL_CALLS]calc[ARGS]{"expression": "1+1"}', '{"expression": "1+1"}'),
    (
        "mistral_list",
        '[TOOL_CALLS][{"name": "calc", "arguments": {"expression": "1+1"}}]',
        ' {"expression": "1+1"}}]',
    ),
    ("mistral_named", '[TOOL_CALLS]calc{"expression": "1+1"}', '{"expression": "1+1"}'),
]


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(("tool_format", "call", "forced_rest"), FAMILIES)
def test_calls_free_and_forced_are_calls_and_extend_the_tokens(
    served_plane: planes.ServedPlane,
    tmp_path: Path,
    tool_format: str,
    call: str,
    forced_rest: str,
    special: bool,
) -> None:
    renderer = serve_family(served_plane, tmp_path / "model", tool_format, special=special)
    served_plane.connect(planes.answering(renderer, call, forced_rest, "two"))
    messages = list(HI)
    url = served_plane.client.post("/sessions", {"run_id": "run"})["base_url"]
    with OpenAI(base_url=url, api_key="none", max_retries=0, timeout=patience()) as agent:
        options: Any
        for options in ({}, {"tool_choice": CALC_CHOICE}):
            answer = agent.chat.completions.create(
                model="policy", messages=messages, tools=[planes.CALC], **options
            )
            [made] = answer.choices[0].message.tool_calls
            assert (made.function.name, json.loads(made.function.arguments)) == (
                "calc",
                {"expression": "1+1"},
            )
            assert not answer.choices[0].message.content
            messages.append(answer.choices[0].message.model_dump(exclude_none=True))
            messages.append({"role": "tool", "tool_call_id": made.id, "content": "2"})
        agent.chat.completions.create(model="policy", messages=messages, tools=[planes.CALC])
    for before, after, text in zip(
        served_plane.asked, served_plane.asked[1:], (call, forced_rest), strict=False
    ):
        recorded = before.prompt_ids + planes.say(renderer, text)
        assert after.prompt_ids[: len(recorded)] == recorded
    assert served_plane.get("/runs/run")["counters"].get("unparsed_calls", 0) == 0


@pytest.mark.parametrize("streamed", [False, True])
def test_of_special_tokens_only_marks_are_read_and_none_is_shown(
    served_plane: planes.ServedPlane, tmp_path: Path, streamed: bool
) -> None:
    renderer = serve_family(served_plane, tmp_path / "model", special=True, more="{{ '</think>' if false }}")
    call = '<tool_call>\n{"name": "calc", "arguments": {"expression": "1+1"}}\n</tool_call>'
    broken = "<tool_call>calc<|x|></tool_call>"
    said = ["<think>\nh<|x|>m\n</think>\n\nYes<|x|>." + call + broken, "<think>hm</think>" + call]
    served_plane.connect(planes.answering(renderer, *said))
    url = served_plane.client.post("/sessions", {"run_id": "run"})["base_url"]

    def ask(**options: Any) -> tuple[str, str, list[str]]:
        with OpenAI(base_url=url, api_key="none", max_retries=0, timeout=patience()) as agent:
            asked = agent.chat.completions.create(model="policy", messages=HI, stream=streamed, **options)
            parts: Any = [c.choices[0].delta for c in asked] if streamed else [asked.choices[0].message]
        return (
            "".join(getattr(part, "reasoning_content", None) or "" for part in parts),
            "".join(part.content or "" for part in parts),
            [made.function.arguments for part in parts for made in part.tool_calls or ()],
        )

    assert ask(tools=[planes.CALC]) == ("hm", "Yes.<tool_call>calc</tool_call>", ['{"expression":"1+1"}'])
    assert served_plane.get("/runs/run")["counters"]["unparsed_calls"] == 1
    # nobody asked for calls
    assert ask() == ("hm", '{"name": "calc", "arguments": {"expression": "1+1"}}\n', [])


def test_tools_are_refused_where_calls_have_no_known_form(
    served_plane: planes.ServedPlane, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(served_plane.model_dir, folder)
    template = folder / "chat_template.jinja"
    template.write_text(
        template.read_text(encoding="utf-8").replace("<tool_call>", "<invoke>"), encoding="utf-8"
    )
    served_plane.model_dir = str(folder)
    served_plane.register(max_tokens=32)
    renderer = Renderer(str(folder))
    assert renderer.tool_format == ""
    served_plane.connect(planes.answering(renderer, "no <tool_call>"))
    url = served_plane.client.post("/sessions", {"run_id": "run"})["base_url"]
    request: Any = {"model": "policy", "messages": HI, "tools": [planes.CALC]}
    for choice in ("auto", "required"):
        refused = httpx.post(f"{url}/chat/completions", json=request | {"tool_choice": choice})
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].startswith(
            "The policy cannot call tools: its chat template writes tool calls in an unknown format."
        )
    counted = httpx.post(
        f"{url}/messages/count_tokens",
        json={"model": "policy", "messages": HI, "tools": [{"name": "calc", "input_schema": {}}]},
    )
    assert counted.status_code == 400
    answered = httpx.post(
        f"{url}/chat/completions", json=request | {"tool_choice": "none"}, timeout=patience()
    )
    assert answered.json()["choices"][0]["message"]["content"] == "no <tool_call>"
