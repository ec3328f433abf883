"""A client of any dialect that sends an answer back sends the same message, whatever the policy said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sf_core.dataplane.chat.answer_parser import Reasoning
from sf_core.dataplane.chat.messages import Message, assistant_message
from sf_core.dataplane.chat.tool_formats import ToolCall
from sf_core.dataplane.gateway.dialects.responses import Responses
from sf_core.dataplane.sessions.session import Session
from sf_core.dataplane.turns.answer import Answer, Event, Pieces, TokenLogprob
from tests.bench.dataplane.clients import CLIENTS, Client

BODY: dict[str, Any] = {"model": "policy", "max_tokens": 5, "store": False}

values = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
calls = st.builds(ToolCall, st.sampled_from(["calc", "add"]), st.dictionaries(st.text(max_size=3), values))
answers = st.builds(
    lambda content, made, reasoning: answer_of(assistant_message(content, made, "s.0.0", reasoning)),
    st.text(max_size=20),
    st.lists(calls, max_size=3),
    st.text(max_size=10),
)


def answer_of(message: Message) -> Answer:
    return Answer("s.0.0", message, "stop", None, 3, 4, None)


@pytest.mark.parametrize("client", [client for client in CLIENTS if client.has_messages])
@given(answer=answers)
def test_an_answer_sent_back_is_the_recorded_message(client: Client, answer: Answer) -> None:
    client.check_sent_back(answer)


def as_streamed(answer: Answer) -> list[Event]:
    text = [answer.content] if answer.content else []
    thought = [Reasoning(answer.reasoning)] if answer.reasoning else []
    return [*thought, *text, *answer.calls]


@given(answers, st.booleans())
def test_the_last_event_of_a_response_is_the_whole_response(answer: Answer, has_logprobs: bool) -> None:
    session = Session("s")
    events = as_streamed(answer)
    # the last token, the end of the turn, comes without text
    sampled = [TokenLogprob(str(i), b"%d" % i, -1.0 * i) for i in range(len(events) + 1)]
    answer = replace(answer, logprobs=sampled if has_logprobs else None)
    whole = orjson.loads(Responses().reply(BODY, "s.0.0", session).whole([answer]))
    reply = Responses().reply(BODY, "s.0.0", session)
    reply.start(3)
    for i, token in enumerate(sampled):
        reply.piece(0, Pieces(events[i : i + 1], [token] if has_logprobs else None))
    reply.end_turn(0, answer)
    last = orjson.loads(reply.end([answer]).split(b"data: ")[1])
    assert last["response"] | {"created_at": 0} == whole | {"created_at": 0}
