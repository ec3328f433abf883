"""What clients of every dialect get from a served data plane, whole and streamed."""

from __future__ import annotations

from typing import Any

import pytest

from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.sessions.session import Session
from sf_core.dataplane.turns.request import ToolChoice
from sf_core.engines.scripted import scripted_logprob
from sf_core.testing.dialects import HI, Heard
from tests.bench import dataplane
from tests.bench.dataplane import planes

STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])


def each(clients: list[dataplane.clients.Client]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("client", clients, ids=[client.dialect.name for client in clients])


def ask(plane: planes.ServedPlane, client: dataplane.clients.Client, streamed: bool, **fields: Any) -> Heard:
    with client.agent(plane.url) as agent:
        [heard] = client.ask(agent, streamed, {**client.request, **fields})
    return heard


@STREAMED
@each(dataplane.clients.CLIENTS)
def test_an_answer_has_text_its_end_and_usage(
    served_plane: planes.ServedPlane, renderer: Renderer, client: dataplane.clients.Client, streamed: bool
) -> None:
    served_plane.register()
    served_plane.connect(planes.answering(renderer, "hello naïve 数学"))
    heard = ask(served_plane, client, streamed, **{client.max_tokens: 100})
    assert (heard.text, heard.end) == ("hello naïve 数学", client.ends["stop"])
    prompt = renderer.encode(renderer.render([HI], []) if client.has_messages else HI["content"]).tolist()
    assert served_plane.asked[0].prompt_ids == prompt
    assert heard.usage == (len(prompt), len(planes.say(renderer, "hello naïve 数学")))


@STREAMED
@each([client for client in dataplane.clients.CLIENTS if client.has_messages])
def test_instructions_are_the_first_message(
    served_plane: planes.ServedPlane, renderer: Renderer, client: dataplane.clients.Client, streamed: bool
) -> None:
    served_plane.register()
    served_plane.connect(planes.answering(renderer, "yes"))
    heard = ask(served_plane, client, streamed, **client.instructed)
    prompt = renderer.encode(renderer.render([dataplane.clients.BRIEF, HI], [])).tolist()
    assert served_plane.asked[0].prompt_ids == prompt
    assert heard.usage == (len(prompt), len(planes.say(renderer, "yes")))


@STREAMED
@each(dataplane.clients.CLIENTS)
def test_the_token_budget_ends_an_answer(
    served_plane: planes.ServedPlane, renderer: Renderer, client: dataplane.clients.Client, streamed: bool
) -> None:
    served_plane.register()
    served_plane.connect(planes.answering(renderer, "the quick brown fox jumps"))
    heard = ask(served_plane, client, streamed, **{client.max_tokens: 3})
    assert (heard.end, heard.usage[1]) == (client.ends["length"], 3)


@each([client for client in dataplane.clients.CLIENTS if client.forced])
def test_a_call_is_asked_for_as_the_dialect_says_it(client: dataplane.clients.Client) -> None:
    for fields, name in client.forced:
        [request] = client.dialect.parse({**client.request, "tools": client.tools, **fields}, Session("s"))
        assert request.tool_choice == ToolChoice("required", name)


@STREAMED
@each([client for client in dataplane.clients.CLIENTS if client.with_logprobs])
def test_log_probs_are_those_of_the_engine(
    served_plane: planes.ServedPlane, renderer: Renderer, client: dataplane.clients.Client, streamed: bool
) -> None:
    served_plane.register(max_tokens=128)
    texts = ["the quick 数学", "fox " + planes.tool_call_text(expression="1+1")]
    served_plane.connect(planes.answering(renderer, *texts))
    fields = {**(client.with_logprobs or {}), client.max_tokens: 128}
    for text in texts:
        heard = ask(
            served_plane, client, streamed, **fields, **({"tools": client.tools} if client.tools else {})
        )
        expected = [scripted_logprob(token, i, 0) for i, token in enumerate(planes.say(renderer, text))]
        assert list(heard.logprobs) == expected
