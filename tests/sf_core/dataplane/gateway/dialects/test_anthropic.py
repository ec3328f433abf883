"""Anthropic Messages with the `anthropic` client against a served data plane."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from sf_core.dataplane.chat.renderer import Renderer
from tests.bench.dataplane import planes
from tests.bench.waits import patience

HI: Any = [{"role": "user", "content": "hi"}]
TOOL: Any = {
    "name": "calc",
    "description": "Evaluates.",
    "input_schema": planes.CALC["function"]["parameters"],
}


def client(plane: planes.ServedPlane, session_id: str | None = None) -> anthropic.Anthropic:
    base = plane.url if session_id is None else f"{plane.url}/sessions/{session_id}"
    return anthropic.Anthropic(
        base_url=base, api_key=plane.agent_key(session_id), max_retries=0, timeout=patience()
    )


def ask(plane: planes.ServedPlane, session_id: str | None = None, messages: Any = HI, **options: Any) -> Any:
    arguments = {"model": "policy", "messages": messages, "max_tokens": 100} | options
    with client(plane, session_id) as agent:
        return agent.messages.create(**arguments)


def test_text_streams_as_it_is_sampled(served_plane: planes.ServedPlane, renderer: Renderer) -> None:
    """In several pieces; how many tokens one carries is a matter of the machine's load (decision 021)."""
    served_plane.register(max_tokens=400, context_length=1024)
    text = "hello naïve 数学 " * 12 + "end"
    served_plane.connect(planes.answering(renderer, text))
    with (
        client(served_plane) as agent,
        agent.messages.stream(model="policy", messages=HI, max_tokens=400) as stream,
    ):
        events = [event for event in stream if event.type != "text"]
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    pieces = [event.delta.text for event in events if event.type == "content_block_delta"]
    assert len(pieces) > 2 and "".join(pieces) == text
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_tool_calls_and_their_results_make_one_token_sequence(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register(max_tokens=128)
    text = "Sure. " + planes.tool_call_text(expression="1+1") + "\n" + planes.tool_call_text(expression="2+2")
    served_plane.connect(planes.answering(renderer, text, "2 and 4"))
    [claim] = served_plane.claim()
    first = ask(served_plane, claim["session_id"], tools=[TOOL])
    assert [block.type for block in first.content] == ["text", "tool_use", "tool_use"]
    assert [block.input for block in first.content[1:]] == [{"expression": "1+1"}, {"expression": "2+2"}]
    assert first.stop_reason == "tool_use"
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "4"}]}
        for block in first.content[1:]
    ]
    echo = {"role": "assistant", "content": [block.model_dump() for block in first.content]}
    question = {"role": "user", "content": [*results, {"type": "text", "text": "well?"}]}
    second = ask(served_plane, claim["session_id"], [*HI, echo, question], tools=[TOOL])
    assert second.content[0].text == "2 and 4"
    recorded = served_plane.asked[0].prompt_ids + planes.say(renderer, text)
    assert served_plane.asked[1].prompt_ids[: len(recorded)] == recorded


def test_a_stop_sequence_is_named(served_plane: planes.ServedPlane, renderer: Renderer) -> None:
    served_plane.register()
    served_plane.connect(planes.answering(renderer, "one two three four"))
    answer = ask(served_plane, stop_sequences=["zzz", "three"])
    assert (answer.content[0].text, answer.stop_reason) == ("one two ", "stop_sequence")
    assert answer.stop_sequence == "three"


def test_one_call_only_where_parallel_ones_are_disabled(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register(max_tokens=128)
    text = planes.tool_call_text(expression="1+1")
    served_plane.connect(planes.answering(renderer, f"{text}\n{text}"))
    choice: Any = {"type": "auto", "disable_parallel_tool_use": True}
    answer = ask(served_plane, tools=[TOOL], tool_choice=choice)
    assert [block.type for block in answer.content] == ["tool_use"]
    assert answer.usage.output_tokens == len(renderer.encode(text))


def test_system_messages_may_stand_among_the_others_and_before_the_result_of_a_call(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register(max_tokens=128)
    served_plane.connect(planes.answering(renderer, planes.tool_call_text(expression="1+1"), "2"))
    [claim] = served_plane.claim()
    reminder: Any = {"role": "system", "content": [{"type": "text", "text": "be brief"}]}
    first = ask(served_plane, claim["session_id"], messages=[*HI, reminder], tools=[TOOL])
    echo = {"role": "assistant", "content": [block.model_dump() for block in first.content]}
    result = {"type": "tool_result", "tool_use_id": first.content[0].id, "content": "2"}
    messages = [*HI, reminder, echo, reminder, {"role": "user", "content": [result]}]
    ask(served_plane, claim["session_id"], messages=messages, tools=[TOOL])
    shown = served_plane.get(f"/sessions/{claim['session_id']}")["prompts"]
    assert [[m["role"] for m in prompt["messages"]] for prompt in shown] == [
        ["user", "system"],
        ["system", "tool"],
    ]
    assert [prompt["branch_reason"] for prompt in shown] == [None, None]


@pytest.mark.parametrize(("normalised", "reasons"), [(True, [None, None]), (False, [None, "edited_history"])])
def test_a_line_that_changes_with_every_request_begins_no_branch_unless_it_is_to_stay(
    served_plane: planes.ServedPlane, renderer: Renderer, normalised: bool, reasons: list[str | None]
) -> None:
    served_plane.register(**({} if normalised else {"normalised": []}))
    served_plane.connect(planes.answering(renderer, "yes"))
    [claim] = served_plane.claim()
    messages = list(HI)
    for number in range(2):
        header = f"x-anthropic-billing-header: cc_version=2.1; cch={number};"
        system: Any = [{"type": "text", "text": header}, {"type": "text", "text": "be brief"}]
        answer = ask(served_plane, claim["session_id"], messages=messages, system=system)
        messages += [{"role": "assistant", "content": answer.content[0].text}, *HI]
    prompts = served_plane.get(f"/sessions/{claim['session_id']}")["prompts"]
    assert [prompt["branch_reason"] for prompt in prompts] == reasons
    held = "x-anthropic" in renderer.decode(list(served_plane.asked[0].prompt_ids))
    assert held == (not normalised)


def test_tokens_are_counted_without_a_turn(served_plane: planes.ServedPlane, renderer: Renderer) -> None:
    served_plane.register()
    [claim] = served_plane.claim()
    with client(served_plane, claim["session_id"]) as agent:
        count = agent.messages.count_tokens(model="policy", messages=HI)
    assert count.input_tokens == len(renderer.encode(renderer.render(HI, [])))
    assert served_plane.get(f"/sessions/{claim['session_id']}")["prompts"] == []


BAD_REQUESTS: list[tuple[dict[str, Any], type[anthropic.APIStatusError], str]] = [
    ({"messages": []}, anthropic.BadRequestError, "at least one message"),
    *(
        (
            {"messages": [*HI, {"role": "assistant", "content": [call]}, *HI]},
            anthropic.BadRequestError,
            r"messages\[1\].content\[0\] must have a name and an id, both strings",
        )
        for call in ({"type": "tool_use", "name": "calc"}, {"type": "tool_use", "name": "calc", "id": 1})
    ),
    ({"messages": [{"role": "user", "content": "the " * 3000}]}, anthropic.BadRequestError, "> 2047 maximum"),
]


def test_bad_requests_raise_what_the_client_has_for_them(served_plane: planes.ServedPlane) -> None:
    served_plane.register()
    for change, kind, sentence in BAD_REQUESTS:
        with pytest.raises(kind, match=sentence) as refused:
            ask(served_plane, **change)
        assert set(refused.value.body) == {"type", "error", "request_id"}


def test_the_key_may_come_in_either_header() -> None:
    with planes.running_app(key="secret") as url:
        for options in ({"api_key": "secret"}, {"auth_token": "secret"}):
            with anthropic.Anthropic(base_url=url, **options) as agent:
                assert agent.models.list().data == []
        with (
            anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0) as agent,
            pytest.raises(anthropic.AuthenticationError, match="missing or wrong"),
        ):
            agent.messages.create(model="policy", messages=HI, max_tokens=5)
