from typing import Any

import pytest

from sf_core.agents.tool_loop import run_tool_loop
from sf_core.environments.calculator import CALCULATOR
from tests.bench.canned_model import CannedModel


def call(arguments: str, name: str = "calc") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"tool_calls": [{"id": "c1", "type": "function", "function": function}]}


async def ask(canned_model: CannedModel, *answers: dict[str, Any], max_turns: int = 4) -> str:
    canned_model.answers = list(answers)
    return await run_tool_loop(canned_model.endpoint, "What is 47*83?", [CALCULATOR], max_turns)


async def test_a_plain_answer_is_returned(canned_model: CannedModel) -> None:
    assert await ask(canned_model, {"content": "3901"}) == "3901"
    assert canned_model.requests[0]["tools"] == [CALCULATOR.schema]


async def test_the_result_of_a_called_tool_is_sent_back(canned_model: CannedModel) -> None:
    assert await ask(canned_model, call('{"expression": "47*83"}'), {"content": "It is 3901"}) == "It is 3901"
    user, assistant, tool = canned_model.requests[1]["messages"]
    assert user == {"role": "user", "content": "What is 47*83?"}
    assert assistant["tool_calls"][0]["function"]["name"] == "calc"
    assert tool == {"role": "tool", "tool_call_id": "c1", "content": "3901"}


@pytest.mark.parametrize(
    "wrong", [call("not json"), call("{}"), call('{"expression": "x"}'), call("{}", name="no_such_tool")]
)
async def test_the_model_is_told_what_was_wrong_with_its_call(
    canned_model: CannedModel, wrong: dict[str, Any]
) -> None:
    assert await ask(canned_model, wrong, {"content": "sorry"}) == "sorry"
    assert canned_model.requests[1]["messages"][-1]["content"].startswith("error: ")


async def test_a_model_that_only_calls_tools_gives_no_answer(canned_model: CannedModel) -> None:
    assert await ask(canned_model, *[call('{"expression": "1+1"}')] * 2, max_turns=2) == ""


async def test_an_answer_that_was_cut_is_an_answer_and_is_not_asked_for_again(
    canned_model: CannedModel,
) -> None:
    assert await ask(canned_model, {"content": "39", "finish_reason": "length"}) == "39"
    assert len(canned_model.requests) == 1
