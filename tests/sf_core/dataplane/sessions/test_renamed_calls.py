"""Harnesses send calls back under ids of their own: the conversation goes on in its row, in every dialect."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sf_core.dataplane.chat.tool_formats import ToolCall
from sf_core.dataplane.gateway.dialects.chat import Chat
from sf_core.dataplane.gateway.dialects.protocol import Dialect
from sf_core.dataplane.sessions.tree import Prompt
from storage.tables.schema import Trajectory
from tests.bench.dataplane import conversations
from tests.sf_core.dataplane.sessions import said_calls

Rename = Callable[[int, int], str | None]
"""(number of the request, number of the call) -> the id that the agent sends; None: the one it was given."""


def rows(
    dialect: Dialect,
    body: Callable[[Sequence[said_calls.Said]], dict[str, Any]],
    args: Sequence[int],
    rename: Rename,
) -> list[Trajectory]:
    """A conversation of these calls, one after the other."""
    renderer = conversations.family("qwen3")
    rng = random.Random(0)
    record = conversations.Record(renderer)
    made: list[said_calls.Said] = []
    for number, x in enumerate(args):
        sent = [(rename(number, i) or call_id, *rest) for i, (call_id, *rest) in enumerate(made)]
        [request] = dialect.parse(body(sent), record.session)
        prompt = record.session.open_prompt(request.messages, request.tools, renderer)
        turn = record.answer(
            prompt,
            conversations.odd_ids(renderer, conversations.call_text("qwen3", x), rng),
            calls=[ToolCall("find", {"x": x})],
        )
        made.append((turn.message["tool_calls"][0]["id"], x, f"found {x}"))
    return record.export()


def told(trajectory: Trajectory) -> tuple[Any, ...]:
    tokens = (trajectory.token_ids, trajectory.logprobs, trajectory.loss_mask)
    return trajectory.messages, trajectory.turns, *(column.tobytes() for column in tokens)


@pytest.mark.parametrize(
    ("dialect", "body"), said_calls.DIALECTS, ids=lambda value: getattr(value, "name", "")
)
@given(
    args=st.lists(st.integers(0, 2), min_size=2, max_size=5),
    names=st.permutations([None, "toolu_0", "toolu_1", "call_x", "9"]),
    shift=st.integers(0, 3),
)
def test_a_renamed_call_gives_the_same_rows(
    dialect: Dialect,
    body: Callable[[Sequence[said_calls.Said]], dict[str, Any]],
    args: list[int],
    names: list[str | None],
    shift: int,
) -> None:
    """If `shift` is not 0, each request of the agent has other ids."""
    as_given = rows(dialect, body, args, lambda number, call: None)
    renamed = rows(dialect, body, args, lambda number, call: names[(number * shift + call) % len(names)])
    assert len(as_given) == 1
    assert [told(row) for row in renamed] == [told(row) for row in as_given]


@pytest.mark.parametrize(
    ("dialect", "body"), said_calls.DIALECTS, ids=lambda value: getattr(value, "name", "")
)
def test_ids_that_every_answer_counts_anew_are_not_mixed_up(
    dialect: Dialect, body: Callable[[Sequence[said_calls.Said]], dict[str, Any]]
) -> None:
    as_given = rows(dialect, body, [1, 1, 2], lambda number, call: None)
    renamed = rows(dialect, body, [1, 1, 2], lambda number, call: "call_0")
    assert [told(row) for row in renamed] == [told(row) for row in as_given]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_calls_of_one_answer_are_renamed_each_by_its_place(order: tuple[int, int]) -> None:
    def told_of(names: Sequence[str | None]) -> list[Any]:
        renderer = conversations.family("qwen3")
        record = conversations.Record(renderer)
        tools = said_calls.chat([])["tools"]
        opening = {"role": "user", "content": "start"}

        def asked(*messages: dict[str, Any]) -> Prompt:
            [request] = Chat().parse({"messages": [opening, *messages], "tools": tools}, record.session)
            return record.session.open_prompt(request.messages, request.tools, renderer)

        text = "\n".join(conversations.call_text("qwen3", x) for x in (1, 2))
        calls = [ToolCall("find", {"x": x}) for x in (1, 2)]
        ids = conversations.odd_ids(renderer, text, random.Random(0))
        given = record.answer(asked(), ids, calls=calls).message["tool_calls"]
        sent = [name or call["id"] for name, call in zip(names, given, strict=True)]
        said = [{**call, "id": name} for name, call in zip(sent, given, strict=True)]
        results = [{"role": "tool", "tool_call_id": sent[i], "content": f"found {i}"} for i in order]
        answer = {"role": "assistant", "content": None, "tool_calls": said}
        record.answer(asked(answer, *results), renderer.encode("done").tolist())
        return [told(row) for row in record.export()]

    as_given = told_of([None, None])
    assert len(as_given) == 1
    assert told_of(["b", "a"]) == told_of(["7", None]) == as_given
