from __future__ import annotations

import base64
import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pydantic import ValidationError

from sf_core.environments.screen.drawing import CELL, COLOURS, PRESSED, Screen, centre, write_rows
from sf_core.environments.screen.environment import ScreenOfButtons
from sf_core.testing.environments import EnvironmentTests
from tests.bench.canned_model import CannedModel

places = st.dictionaries(
    st.tuples(st.integers(0, 3), st.integers(0, 2)), st.sampled_from([*COLOURS]), max_size=12
)


def pixel(png: bytes, at: tuple[int, int]) -> Any:
    return Image.open(io.BytesIO(png)).getpixel(at)


class TestScreenOfButtons(EnvironmentTests):
    environment = ScreenOfButtons()


def test_screens_that_are_too_few_for_two_splits_are_refused() -> None:
    with pytest.raises(ValidationError, match="the settings allow too few screens, so the split"):
        ScreenOfButtons(columns=2, rows=2, targets=4, others=0, named=("red",))


@given(places)
def test_a_screen_has_the_buttons_of_its_rows(buttons: dict[tuple[int, int], str]) -> None:
    screen = Screen(write_rows(buttons, columns=4, rows=3))
    assert screen.buttons == buttons
    png = screen.draw()
    assert Image.open(io.BytesIO(png)).size == (4 * CELL, 3 * CELL)
    assert all(pixel(png, centre(place)) == COLOURS[colour] for place, colour in buttons.items())


def test_a_button_turns_grey_once_and_a_click_beside_it_does_nothing() -> None:
    screen = Screen(["r.", ".b"])
    before = screen.draw()
    for beside in ((CELL + 5, 5), (0, 0), (9999, 9999)):
        screen.click(*beside)
    assert screen.draw() == before and screen.pressed == []
    screen.click(*centre((1, 1)))
    screen.click(*centre((1, 1)))
    assert screen.pressed == ["blue"]
    assert pixel(screen.draw(), centre((1, 1))) == PRESSED
    assert pixel(screen.draw(), centre((0, 0))) == COLOURS["red"]


def test_the_reward_is_the_share_of_the_named_buttons() -> None:
    environment = ScreenOfButtons()
    task = environment.tasks("train", 3)
    first, second = task.answer.split("; ")
    assert environment.reward(task, task.answer) == 1.0
    assert environment.reward(task, first) == environment.reward(task, f"{first}; {first}") == 0.5
    assert environment.reward(task, f"no; {second}") == 0.5
    # a wrong click costs its share, although another follows
    assert environment.reward(task, f"0,0; {task.answer}") == 0.5
    assert environment.reward(task, "") == 0.0


def test_a_demonstration_presses_every_named_button_and_sees_what_becomes_of_it() -> None:
    environment = ScreenOfButtons(targets=3)
    for index in range(20):
        task = environment.tasks("train", index)
        shown = environment.demonstrate(index)
        assert [message["role"] for message in shown.messages] == [
            "user",
            *["assistant", "tool"] * 2,
            "assistant",
        ]
        calls = [call for message in shown.messages for call in message.get("tool_calls", ())]
        clicks = "; ".join(call["function"]["arguments"]["at"] for call in calls)
        assert environment.reward(task, clicks) == 1.0
        screen = Screen(task.metadata["rows"])
        pressed = iter(clicks.split("; "))
        for message in shown.messages:
            if message["role"] == "assistant":
                x, y = next(pressed).split(",")
                screen.click(int(x), int(y))
                continue
            url = message["content"][-1]["image_url"]["url"]
            assert base64.b64decode(url.removeprefix("data:image/png;base64,")) == screen.draw()


def test_more_buttons_than_places_are_refused() -> None:
    with pytest.raises(
        ValidationError, match=r"`targets` \(2\) plus `others` \(4\) must not exceed the 4 places"
    ):
        ScreenOfButtons(columns=2, rows=2)


async def test_the_agent_sends_the_screen_and_what_became_of_it(canned_model: CannedModel) -> None:
    """What it sends is what a demonstration shows."""
    environment = ScreenOfButtons()
    task = environment.tasks("train", 7)
    shown = environment.demonstrate(7).messages
    written = [
        {"tool_calls": [{**call, "function": call["function"] | {"arguments": json.dumps(arguments)}}]}
        for message in shown
        for call in message.get("tool_calls", ())
        for arguments in (call["function"]["arguments"],)
    ]
    canned_model.answers = written
    answer = await environment.agent(task, canned_model.endpoint)
    assert answer == task.answer and environment.reward(task, answer) == 1.0
    first, second = canned_model.requests
    assert first["messages"] == shown[:1]
    assert second["messages"][-1] == shown[2]
    assert first["tools"] == environment.demonstrate(7).tools
