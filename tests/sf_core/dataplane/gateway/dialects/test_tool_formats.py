"""Model families with other formats of tool calls, as seen by an agent that does not know them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from sf_core.dataplane.chat.renderer import Renderer
from tests.patience import patience
from tests.sf_core.dataplane.stand import CALC, Server, answering, say

HI: Any = [{"role": "user", "content": "hi"}]
CALC_CHOICE: Any = {"type": "function", "function": {"name": "calc"}}


def serve_family(server: Server, folder: Path, tool_format: str) -> None:
    shutil.copytree(server.model_dir, folder)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tool_format": tool_format}))
    server.model_dir = str(folder)
    server.register(max_tokens=128)


@pytest.mark.parametrize(
    ("tool_format", "call", "forced_rest"),
    [
        (
            "llama3_json",
            '{"name": "calc", "parameters": {"expression": "1+1"}}',
            ' {"expression": "1+1"}}',
        ),
        ("plain", "<tool_call>calc 1+1</tool_call>", "1+1</tool_call>"),
    ],
)
def test_calls_free_and_forced_are_calls_and_extend_the_tokens(
    server: Server, renderer: Renderer, tmp_path: Path, tool_format: str, call: str, forced_rest: str
) -> None:
    serve_family(server, tmp_path / "model", tool_format)
    server.connect(answering(renderer, call, forced_rest, "two"))
    session_id = server.post("/sessions", {"run_id": "run"})["session_id"]
    messages = list(HI)
    url = f"{server.url}/sessions/{session_id}/v1"
    with OpenAI(base_url=url, api_key="none", max_retries=0, timeout=patience()) as agent:
        options: Any
        for options in ({}, {"tool_choice": CALC_CHOICE}):
            answer = agent.chat.completions.create(model="policy", messages=messages, tools=[CALC], **options)
            [made] = answer.choices[0].message.tool_calls
            assert (made.function.name, json.loads(made.function.arguments)) == (
                "calc",
                {"expression": "1+1"},
            )
            messages.append(answer.choices[0].message.model_dump(exclude_none=True))
            messages.append({"role": "tool", "tool_call_id": made.id, "content": "2"})
        agent.chat.completions.create(model="policy", messages=messages, tools=[CALC])
    for before, after, text in zip(server.asked, server.asked[1:], (call, forced_rest), strict=False):
        recorded = before.prompt_ids + say(renderer, text)
        assert after.prompt_ids[: len(recorded)] == recorded
