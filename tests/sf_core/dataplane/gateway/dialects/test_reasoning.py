"""What a reasoning model thinks, in every dialect that has a place for it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import anthropic
import pytest
from google import genai
from openai import OpenAI

from sf_core.dataplane.chat.renderer import Renderer
from tests.bench.dataplane import planes
from tests.bench.waits import patience

HI: Any = [{"role": "user", "content": "hi"}]
MORE: Any = {"role": "user", "content": "and?"}
THOUGHT = "<think>\nhm, so\n</think>\n\nYes."


@pytest.fixture
def thinking(served_plane: planes.ServedPlane, tmp_path: Path) -> planes.ServedPlane:
    """A policy whose template, as reasoning models' do, drops what was thought before the last question."""
    folder = tmp_path / "thinking"
    shutil.copytree(served_plane.model_dir, folder)
    template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    shown = "{{ '<think>\\n' + message.reasoning_content + '</think>' if message.reasoning_content }}"
    (folder / "chat_template.jinja").write_text(
        template.replace("{{ message.content }}", shown + "{{ message.content }}"), encoding="utf-8"
    )
    served_plane.model_dir = str(folder)
    served_plane.register(max_tokens=128)
    return served_plane


def v1(plane: planes.ServedPlane, session_id: str) -> OpenAI:
    url = f"{plane.url}/sessions/{session_id}/v1"
    return OpenAI(base_url=url, api_key="none", max_retries=0, timeout=patience())


def extends_the_first_turn(plane: planes.ServedPlane, renderer: Renderer) -> bool:
    recorded = plane.asked[0].prompt_ids + planes.say(renderer, THOUGHT)
    return plane.asked[1].prompt_ids[: len(recorded)] == recorded


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("echoed", [False, True])
def test_chat_has_reasoning_content(
    thinking: planes.ServedPlane, renderer: Renderer, streamed: bool, echoed: bool
) -> None:
    thinking.connect(planes.answering(renderer, THOUGHT))
    session_id = thinking.client.post("/sessions", {"run_id": "run"})["session_id"]
    with v1(thinking, session_id) as agent:
        if streamed:
            deltas = [
                chunk.choices[0].delta
                for chunk in agent.chat.completions.create(model="policy", messages=HI, stream=True)
            ]
            reasoning = "".join(getattr(delta, "reasoning_content", "") for delta in deltas)
            content = "".join(delta.content or "" for delta in deltas)
        else:
            message = agent.chat.completions.create(model="policy", messages=HI).choices[0].message
            reasoning = message.reasoning_content
            content = message.content
        assert (reasoning, content) == ("hm, so", "Yes.")
        answer: Any = {"role": "assistant", "content": content}
        answer |= {"reasoning_content": reasoning} if echoed else {}
        agent.chat.completions.create(model="policy", messages=[*HI, answer, MORE])
    assert extends_the_first_turn(thinking, renderer)
    tree = thinking.get(f"/sessions/{session_id}")
    assert tree["turns"][0]["message"]["reasoning_content"] == "hm, so"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("echoed", [False, True])
def test_responses_have_a_reasoning_item(
    thinking: planes.ServedPlane, renderer: Renderer, streamed: bool, echoed: bool
) -> None:
    thinking.connect(planes.answering(renderer, THOUGHT))
    session_id = thinking.client.post("/sessions", {"run_id": "run"})["session_id"]
    with v1(thinking, session_id) as agent:
        if streamed:
            with agent.responses.stream(model="policy", input=HI) as stream:
                answer = stream.get_final_response()
        else:
            answer = agent.responses.create(model="policy", input=HI)
        thought, message = answer.output
        assert (thought.content[0].text, message.content[0].text) == ("hm, so", "Yes.")
        if echoed:
            echo = [item.model_dump(exclude_none=True) for item in answer.output]
            agent.responses.create(model="policy", input=[*HI, *echo, MORE])
        else:
            agent.responses.create(model="policy", input=[MORE], previous_response_id=answer.id)
    assert extends_the_first_turn(thinking, renderer)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("echoed", [False, True])
def test_messages_have_a_thinking_block(
    thinking: planes.ServedPlane, renderer: Renderer, streamed: bool, echoed: bool
) -> None:
    thinking.connect(planes.answering(renderer, THOUGHT))
    session_id = thinking.client.post("/sessions", {"run_id": "run"})["session_id"]
    url = f"{thinking.url}/sessions/{session_id}"
    options: Any = {"model": "policy", "max_tokens": 100}
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as agent:
        if streamed:
            with agent.messages.stream(messages=HI, **options) as stream:
                answer = stream.get_final_message()
        else:
            answer = agent.messages.create(messages=HI, **options)
        thought, text = answer.content
        assert (thought.thinking, text.text) == ("hm, so", "Yes.")
        blocks = [block.model_dump() for block in answer.content[0 if echoed else 1 :]]
        agent.messages.create(messages=[*HI, {"role": "assistant", "content": blocks}, MORE], **options)
    assert extends_the_first_turn(thinking, renderer)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("echoed", [False, True])
def test_contents_have_thought_parts(
    thinking: planes.ServedPlane, renderer: Renderer, streamed: bool, echoed: bool
) -> None:
    thinking.connect(planes.answering(renderer, THOUGHT))
    url = f"{thinking.url}/sessions/{thinking.client.post('/sessions', {'run_id': 'run'})['session_id']}"
    asked: Any = {"role": "user", "parts": [{"text": "hi"}]}
    with genai.Client(api_key="none", vertexai=False, http_options={"base_url": url}) as agent:
        if streamed:
            chunks = list(agent.models.generate_content_stream(model="policy", contents=asked))
        else:
            chunks = [agent.models.generate_content(model="policy", contents=asked)]
        parts = [part for chunk in chunks for part in chunk.candidates[0].content.parts]
        thought = "".join(part.text for part in parts if part.thought)
        assert (thought, "".join(part.text for part in parts if not part.thought)) == ("hm, so", "Yes.")
        answer: Any = {"role": "model", "parts": [part for part in parts if echoed or not part.thought]}
        agent.models.generate_content(model="policy", contents=[asked, answer, asked])
    assert extends_the_first_turn(thinking, renderer)


def test_a_forced_call_closes_the_reasoning_the_template_opens(
    thinking: planes.ServedPlane, renderer: Renderer
) -> None:
    template = Path(thinking.model_dir) / "chat_template.jinja"
    template.write_text(
        template.read_text(encoding="utf-8").replace("assistant\n{% endif", "assistant\n<think>\n{% endif"),
        encoding="utf-8",
    )
    thinking.register(run_id="open", run_dir=str(thinking.run_dir / "open"), max_tokens=128)
    opened = Renderer(thinking.model_dir)
    assert opened.opens_thinking
    rest = ' "calc", "arguments": {"expression": "1+1"}}\n</tool_call>'
    thinking.connect(planes.answering(renderer, rest, "hm\n</think>\n\nYes."), run_id="open")
    session_id = thinking.client.post("/sessions", {"run_id": "open"})["session_id"]
    with v1(thinking, session_id) as agent:
        options: Any = {"model": "policy", "messages": HI}
        [choice] = agent.chat.completions.create(
            **options, tools=[planes.CALC], tool_choice="required"
        ).choices
        assert choice.message.tool_calls[0].function.name == "calc"
        forced = '\n</think>\n\n<tool_call>\n{"name":'
        expected = opened.encode(opened.render(HI, [planes.CALC]) + forced).tolist()
        assert thinking.asked[0].prompt_ids == expected
        [choice] = agent.chat.completions.create(**options).choices
        assert (choice.message.reasoning_content, choice.message.content) == ("hm", "Yes.")
    thinking.post("/runs/open/release")


def test_reasoning_may_come_before_a_call(thinking: planes.ServedPlane, renderer: Renderer) -> None:
    thinking.connect(
        planes.answering(renderer, "<think>\nhm\n</think>\n\n" + planes.tool_call_text(expression="1+1"))
    )
    session_id = thinking.client.post("/sessions", {"run_id": "run"})["session_id"]
    with v1(thinking, session_id) as agent:
        message = (
            agent.chat.completions.create(model="policy", messages=HI, tools=[planes.CALC]).choices[0].message
        )
    assert (message.reasoning_content, message.content) == ("hm", None)
    assert message.tool_calls[0].function.name == "calc"
