"""Buttons of one colour among others: the agent sees the screen, and after each click what became of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random
from typing import Any, get_args

from pydantic import Field, model_validator

from sf_core.agents.tool_loop import Tool, run_tool_loop
from sf_core.environments.environment import Demonstration, Environment
from sf_core.environments.screen.drawing import COLOURS, Colour, Place, Screen, as_parts, centre, write_rows
from sf_core.environments.splits import MAX_ATTEMPTS, Split, split_of
from sf_core.types import Endpoint, Task

CLICK = re.compile(r"\s*(\d{1,4})\s*,\s*(\d{1,4})\s*")

PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}


class ScreenOfButtons(Environment):
    """The policy clicks on a drawn screen. The reward is the share of the buttons of the named colour that
    the policy clicked. A session has as many clicks as the screen has buttons of the named colour, so every
    wrong click lowers the reward."""

    columns: int = Field(4, ge=2, le=16)
    """Number of columns of the grid in which the buttons are placed."""
    rows: int = Field(4, ge=2, le=16)
    """Number of rows of the grid in which the buttons are placed."""
    targets: int = Field(2, ge=1, le=8)
    """Number of buttons of the named colour. A session has the same number of clicks."""
    others: int = Field(4, ge=0)
    """Number of buttons of other colours."""
    named: tuple[Colour, ...] = Field(tuple(COLOURS), min_length=1)
    """Colours that instructions can name. If only one colour is listed, the policy can ignore the
    instruction."""

    @model_validator(mode="after")
    def _has_places(self) -> ScreenOfButtons:
        if self.targets + self.others > self.columns * self.rows:
            raise ValueError(
                f"`targets` ({self.targets}) plus `others` ({self.others}) must not exceed the "
                f"{self.columns * self.rows} places of {self.columns} columns and {self.rows} rows"
            )
        for split in get_args(Split):
            self.tasks(split, 0)
        return self

    def tasks(self, split: Split, index: int) -> Task:
        for attempt in range(MAX_ATTEMPTS):
            colour, rows = self._draw(Random(f"{split} {index} {attempt}"))
            if split_of("".join(rows)) == split:
                break
        else:
            raise ValueError(
                f"the settings allow too few screens, so the split {split} has no screen: increase "
                "columns, rows or others"
            )
        screen = Screen(rows)
        instruction = f"Press all {colour} buttons."
        targets = [cell for cell, button_colour in screen.buttons.items() if button_colour == colour]
        return Task(
            f"screen-{split}-{index}",
            "screen",
            "\n".join([instruction, *rows]),
            "; ".join(map(_write, targets)),
            {"instruction": instruction, "colour": colour, "rows": rows},
        )

    async def agent(self, task: Task, endpoint: Endpoint) -> str:
        screen = Screen(task.metadata["rows"])
        clicks = list[str]()

        def click(at: str) -> list[dict[str, Any]]:
            _click(screen, at)
            clicks.append(at)
            return as_parts([], screen.draw())

        prompt = as_parts([task.metadata["instruction"]], screen.draw())
        await run_tool_loop(endpoint, prompt, [_tool(click)], max_turns=self.targets)
        return "; ".join(clicks)

    def reward(self, task: Task, answer: str) -> float:
        screen = Screen(task.metadata["rows"])
        for at in answer.split(";")[: self.targets]:
            if CLICK.fullmatch(at):
                _click(screen, at)
        return screen.pressed.count(task.metadata["colour"]) / self.targets

    def demonstrate(self, index: int) -> Demonstration:
        task = self.tasks("train", index)
        screen = Screen(task.metadata["rows"])
        question = as_parts([task.metadata["instruction"]], screen.draw())
        messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
        for number, pixel in enumerate(task.answer.split("; ")):
            call_id = f"call_{number}"
            function = {"name": "click", "arguments": {"at": pixel}}
            call = {"id": call_id, "type": "function", "function": function}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            _click(screen, pixel)
            result = as_parts([], screen.draw())
            messages.append({"role": "tool", "tool_call_id": call_id, "content": result})
        # the session ends with the last click
        return Demonstration(messages[:-1], [_tool(str).schema])

    def _draw(self, random: Random) -> tuple[str, list[str]]:
        """A colour, and a screen with buttons of it."""
        colour = random.choice(self.named)
        other_colours = [another for another in COLOURS if another != colour]
        cells: list[Place] = []
        for row in range(self.rows):
            cells += [(column, row) for column in range(self.columns)]
        chosen = random.sample(cells, self.targets + self.others)
        colours = [colour] * self.targets + random.choices(other_colours, k=self.others)
        buttons = dict(zip(chosen, colours, strict=True))
        return colour, write_rows(buttons, self.columns, self.rows)


def _tool(click: Callable[..., Any]) -> Tool:
    return Tool("click", "Click at a pixel of the screen, as X,Y.", PARAMETERS, click)


def _write(cell: Place) -> str:
    x, y = centre(cell)
    return f"{x},{y}"


def _click(screen: Screen, at: str) -> None:
    match = CLICK.fullmatch(at)
    if match is None:
        raise ValueError("expected X,Y, two numbers")
    screen.click(int(match[1]), int(match[2]))
