"""OpenAI Responses with the `openai` client against a served data plane."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from sf_core.dataplane.chat.answer_parser import Reasoning
from sf_core.dataplane.chat.messages import assistant_message
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.chat.tool_formats import ToolCall
from sf_core.dataplane.gateway.dialects.responses import Responses
from sf_core.dataplane.sessions.session import Session
from sf_core.dataplane.turns.answer import Answer, Event, MadeCall, Pieces
from sf_core.testing.dialects import read_events
from tests.bench.dataplane import planes
from tests.bench.waits import patience

TOOL: Any = {"type": "function", "strict": False, **planes.CALC["function"]}


def client(plane: planes.ServedPlane, session_id: str | None = None) -> OpenAI:
    base = plane.url if session_id is None else f"{plane.url}/sessions/{session_id}"
    return OpenAI(
        base_url=f"{base}/v1", api_key=plane.agent_key(session_id), max_retries=0, timeout=patience()
    )


def ask(plane: planes.ServedPlane, session_id: str | None = None, given: Any = "hi", **options: Any) -> Any:
    with client(plane, session_id) as agent:
        return agent.responses.create(model="policy", input=given, **options)


def test_the_event_stream_is_the_one_clients_expect(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register(max_tokens=64)
    served_plane.connect(planes.answering(renderer, "Sure. " + planes.tool_call_text(expression="1+1")))
    events: list[Any] = []
    served_plane.engines["r0"].steps_left = 3
    with client(served_plane) as agent:
        for event in agent.responses.create(model="policy", input="hi", tools=[TOOL], stream=True):
            events.append(event)
            if event.type == "response.output_text.delta":
                served_plane.engines["r0"].steps_left = None
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = [kind for kind in kinds if kind == "output_text.delta"]
    assert len(deltas) > 1
    assert [kind for kind in kinds if kind != "output_text.delta"] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    [delta] = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert (delta.output_index, json.loads(delta.delta)) == (1, {"expression": "1+1"})


@pytest.mark.parametrize("named", ["response", "items", "copies"])
def test_tool_calls_and_their_results_make_one_token_sequence(
    served_plane: planes.ServedPlane, renderer: Renderer, named: str
) -> None:
    served_plane.register(max_tokens=128)
    text = "Sure. " + planes.tool_call_text(expression="1+1") + planes.tool_call_text(expression="2+2")
    served_plane.connect(planes.answering(renderer, text, "2 and 4"))
    [claim] = served_plane.claim()
    options = {"tools": [TOOL], "instructions": "be brief"}
    first = ask(served_plane, claim["session_id"], **options)
    message, *calls = first.output
    assert (message.content[0].text, [call.type for call in calls]) == ("Sure. ", ["function_call"] * 2)
    assert [json.loads(call.arguments)["expression"] for call in calls] == ["1+1", "2+2"]
    results: list[Any] = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "4"} for call in calls
    ]
    if named == "response":
        options |= {"previous_response_id": first.id}
        given = results
    elif named == "items":
        references = [{"type": "item_reference", "id": item.id} for item in first.output]
        given = [{"role": "user", "content": "hi"}, *references, *results]
    else:
        thought = {"type": "reasoning", "id": "rs_1", "summary": []}
        echo = [item.model_dump(exclude_none=True) for item in first.output]
        given = [{"role": "user", "content": "hi"}, thought, *echo, *results]
    second = ask(served_plane, claim["session_id"], given, **options)
    assert second.output_text == "2 and 4"
    recorded = served_plane.asked[0].prompt_ids + planes.say(renderer, text)
    assert served_plane.asked[1].prompt_ids[: len(recorded)] == recorded


def test_instructions_do_not_carry_over(served_plane: planes.ServedPlane, renderer: Renderer) -> None:
    served_plane.register()
    served_plane.connect(planes.answering(renderer, "yes"))
    [claim] = served_plane.claim()
    first = ask(served_plane, claim["session_id"], instructions="be brief")
    ask(served_plane, claim["session_id"], given="more", previous_response_id=first.id)
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "more"},
    ]
    assert served_plane.asked[1].prompt_ids == renderer.encode(renderer.render(messages, [])).tolist()


def test_an_answer_cut_by_its_budget_is_incomplete(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register()
    served_plane.connect(planes.answering(renderer, "the quick brown fox jumps"))
    whole = ask(served_plane, max_output_tokens=3)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [item.status for item in whole.output] == ["incomplete"]
    with client(served_plane) as agent:
        *_, last = agent.responses.create(model="policy", input="hi", max_output_tokens=3, stream=True)
    assert (last.type, last.response.output_text) == ("response.incomplete", whole.output_text)


def test_tools_that_a_provider_would_run_are_left_out_and_counted(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register()
    served_plane.connect(planes.answering(renderer, "yes"))
    [claim] = served_plane.claim()
    tools = [{"type": "web_search"}, TOOL, {"type": "namespace", "name": "mcp", "tools": [TOOL]}]
    given = [{"type": "additional_tools", "tools": []}, {"role": "user", "content": "hi"}]
    ask(served_plane, claim["session_id"], given=given, tools=tools)
    ask(served_plane, claim["session_id"], given="hi", tools=[TOOL])
    assert served_plane.asked[0].prompt_ids == served_plane.asked[1].prompt_ids
    counters = served_plane.get("/runs/run")["counters"]
    assert {name: number for name, number in counters.items() if name.startswith("left_out")} == {
        f"left_out.{kind}": 1 for kind in ("web_search", "namespace", "additional_tools")
    }


OTHER: Any = {**TOOL, "name": "other"}


@pytest.mark.parametrize(("mode", "answer"), [("auto", "yes"), ("required", ' "calc", "arguments": {}}')])
def test_of_allowed_tools_the_model_is_shown_no_others(
    served_plane: planes.ServedPlane, renderer: Renderer, mode: str, answer: str
) -> None:
    served_plane.register(max_tokens=64)
    served_plane.connect(planes.answering(renderer, answer))
    [claim] = served_plane.claim()
    allowed = {"mode": mode, "tools": [{"type": "function", "name": "calc"}]}
    choice: Any = {"type": "allowed_tools", **allowed}
    ask(served_plane, claim["session_id"], tools=[OTHER, TOOL], tool_choice=choice)
    ask(served_plane, claim["session_id"], tools=[TOOL], tool_choice=mode)
    with client(served_plane, claim["session_id"]) as agent:
        functions: list[Any] = [
            {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
            for tool in (OTHER, TOOL)
        ]
        in_chat = {"mode": mode, "tools": [{"type": "function", "function": {"name": "calc"}}]}
        agent.chat.completions.create(
            model="policy",
            messages=[{"role": "user", "content": "hi"}],
            tools=functions,
            tool_choice={"type": "allowed_tools", "allowed_tools": in_chat},  # type: ignore[typeddict-item]
        )
    prompts = [asked.prompt_ids for asked in served_plane.asked]
    assert prompts[0] == prompts[1] == prompts[2]


@pytest.mark.parametrize(
    ("change", "status", "sentence"),
    [
        (
            {"input": [{"type": "item_reference", "id": "msg_s.0.0.1"}]},
            404,
            "item 'msg_s.0.0.1' is unknown in this session",
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "x"}]}},
            400,
            "tool_choice allows functions that are not in tools: 'x'",
        ),
        ({"tools": [{"type": ["web_search"]}]}, 400, "tools[0]: only functions are supported"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": ["x"]}, 1]}},
            400,
            "tool_choice allows functions that are not in tools: ['x'], None",
        ),
        ({"previous_response_id": "resp_x"}, 404, "unknown in this session"),
        ({"background": True}, 400, "background is not supported"),
    ],
)
def test_bad_requests_get_a_sentence(
    served_plane: planes.ServedPlane, change: dict[str, Any], status: int, sentence: str
) -> None:
    served_plane.register()
    body = {"model": "policy", "input": "x"} | change
    response = httpx.post(f"{served_plane.url}/v1/responses", json=body)
    assert (response.status_code, sentence in response.json()["error"]["message"]) == (status, True)


def test_a_session_that_ends_ends_the_stream_with_an_error(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register(max_tokens=2000)
    served_plane.connect(lambda prompt, seed: renderer.encode("the " * 1500).tolist())
    [claim] = served_plane.claim()
    with client(served_plane, claim["session_id"]) as agent:
        events = iter(agent.responses.create(model="policy", input="hi", stream=True))
        next(events)
        served_plane.post(f"/sessions/{claim['session_id']}/finish", {"status": "failed", "error": "enough"})
        with pytest.raises(openai.APIError, match="the session is over"):
            list(events)


@pytest.mark.parametrize(
    ("answer", "statuses"),
    [
        ([Reasoning("hm"), "Ye"], ["completed", "incomplete"]),
        # the message is for the client to send back
        ([Reasoning("hm")], ["incomplete", "incomplete"]),
        ([], ["incomplete"]),
        (["Sure. ", MadeCall("c0", "calc", "{}")], ["completed", "completed"]),
    ],
)
def test_the_item_in_which_an_answer_was_cut_is_incomplete_whole_and_streamed(
    answer: list[Event], statuses: list[str]
) -> None:
    thought = "".join(event.text for event in answer if isinstance(event, Reasoning))
    text = "".join(event for event in answer if isinstance(event, str))
    calls = [ToolCall(event.name, {}) for event in answer if isinstance(event, MadeCall)]
    cut = Answer("s.0.0", assistant_message(text, calls, "s.0.0", thought), "length", None, 3, 4, None)
    body = {"model": "policy", "input": "hi"}
    whole = json.loads(Responses().reply(body, "s.0.0", Session("s")).whole([cut]))
    assert (whole["status"], [item["status"] for item in whole["output"]]) == ("incomplete", statuses)
    reply = Responses().reply({**body, "stream": True}, "s.0.0", Session("s"))
    sent = [reply.start(3), *(reply.piece(0, Pieces([event], None)) for event in answer)]
    events = read_events(b"".join([*sent, reply.end_turn(0, cut), reply.end([cut])]))
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["status"] for item in done] == statuses
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["output"] == done
