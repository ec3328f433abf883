"""What a function that a model wrote returns, and how much of it is right.

The sandbox gets the function and what to call it with. What it should return stays here, so nothing that runs
there can make a wrong answer right.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from sf_core.agents.sandbox import Sandbox, open_sandbox
from sf_core.config.programs import SandboxLimits

DRIVER = Path(__file__).with_name("driver.py").read_text()

CPU_S, WAIT_S = 1.0, 5.0
"""Seconds that a call may take on a CPU, and by the clock, which runs on where the machine is busy."""

RUN_S = 30.0
"""Seconds for all calls; those that come later fail."""

LIMITS = SandboxLimits(memory_mb=256, disk_mb=8, processes=16, open_files=64, cpu_s=10, output_mb=1)
"""Enough for small functions."""

RewardFor = Literal["share", "all"]
"""What is worth 1. share: the hidden tests in proportion. all: nothing less than all of them."""


class HiddenTests(msgspec.Struct, frozen=True):
    """What a function should return for certain arguments; as text, the `answer` of its task."""

    function: str
    """Its name."""
    solution: str
    """A source that passes."""
    calls: list[list[Any]]
    returns: list[Any]
    """What each of the calls should return."""

    def to_text(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_text(cls, text: str) -> HiddenTests:
        return msgspec.json.decode(text, type=cls)

    @classmethod
    def make(
        cls, function: str, solution: str, does: Callable[..., Any], calls: list[list[Any]]
    ) -> HiddenTests:
        """Tests that a solution passes which does this."""
        return cls(function, solution, calls, [does(*arguments) for arguments in calls])

    async def reward(self, source: str, reward_for: RewardFor) -> float:
        """What the function in this source earns."""
        async with open_sandbox(LIMITS) as box:
            returned = await returns_of(box, source, self.function, self.calls)
        num_passed = sum(map(operator.eq, returned, map(json.dumps, self.returns)))
        return num_passed / len(self.calls) if reward_for == "share" else float(num_passed == len(self.calls))


async def returns_of(
    box: Sandbox, source: str, function: str, calls: list[list[Any]], wait_s: float = WAIT_S
) -> list[str | None]:
    """What the function returns for each list of arguments, as JSON; None for a call that does not return
    within `wait_s`, or returns what JSON has no form for."""
    given = {"source": source, "function": function, "calls": calls, "cpu_s": CPU_S, "wait_s": wait_s}
    ended = await box.run_python(DRIVER, stdin=json.dumps(given), timeout_s=RUN_S)
    returned: list[str | None] = [None] * len(calls)
    for line in ended.output.splitlines():
        try:
            index, value = json.loads(line)
            # the first counts: who writes several has one guess
            if returned[index] is None:
                returned[index] = json.dumps(value)
        except (ValueError, TypeError, IndexError, RecursionError):
            continue  # no answer of the driver's
    return returned
