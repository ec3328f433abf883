from __future__ import annotations

import asyncio
import inspect
import json

import pytest

from sf_core.agents import loop_watch
from sf_core.agents.loop_watch import place_of_step, watch_for_blocks
from tests.patience import patience, wait_until

pytestmark = pytest.mark.anyio


async def test_each_block_of_the_loop_is_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_watch, "BLOCKED_S", 0.2)
    monkeypatch.setattr(loop_watch, "LOOK_S", 0.01)

    async def agent(number: int) -> None:
        wait_until(lambda: len(caplog.messages) == number)

    with watch_for_blocks(lambda: 7):
        for number in (1, 2):
            await asyncio.create_task(agent(number))
            # the watch sees that the loop turns, and looks again
            await asyncio.sleep(0.1)
    assert len(caplog.messages) == 2
    for message in caplog.messages:
        assert " has blocked the event loop for 0.2 s, and the 7 sessions" in message


async def place_in(*, is_inside_the_library: bool) -> str:
    """The place that is named while a library calls back a function of the user's or is itself at work."""
    places: list[str] = []

    def encode(value: object) -> str:
        frame = inspect.currentframe()
        assert frame is not None and frame.f_back is not None
        places.append(place_of_step(frame.f_back if is_inside_the_library else frame))
        return ""

    async def agent() -> None:
        # with an indent, the encoder has frames of its own
        json.dumps([object()], default=encode, indent=1)

    await asyncio.wait_for(asyncio.create_task(agent()), patience())
    return places[0]


@pytest.mark.parametrize(("is_inside_the_library", "function"), [(True, "agent"), (False, "encode")])
async def test_the_innermost_line_of_the_users_own_is_named(
    is_inside_the_library: bool, function: str
) -> None:
    place = await place_in(is_inside_the_library=is_inside_the_library)
    assert place.startswith(f"{__file__}:")
    assert place.endswith(f".<locals>.{function})")
