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
"""Limits of the sandbox for small functions."""

RewardFor = Literal["share", "all"]
"""`share`: the reward is the share of hidden tests that pass. `all`: the reward is 1 if all pass, else 0."""


class HiddenTests(msgspec.Struct, frozen=True):
    """Tests of a function that a model writes: calls and the values that they should return.

    Keep them as text in `Task.answer`, which the policy does not see. The values stay outside the sandbox.

    ```python
    tests = HiddenTests.make("double", "def double(x): return 2*x", lambda x: 2 * x, [[3], [7]])
    task = Task("double", "programs", "Write double(x).", answer=tests.to_text())
    reward = await HiddenTests.from_text(task.answer).reward("def double(x): return x+x", "share")
    ```
    """

    function: str
    """The name of the function."""
    solution: str
    """Python source of a function that passes the tests."""
    calls: list[list[Any]]
    """The arguments of each call, as values of JSON."""
    returns: list[Any]
    """The expected value of each call, as a value of JSON."""

    def to_text(self) -> str:
        """The tests as JSON."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_text(cls, text: str) -> HiddenTests:
        """Read the tests from JSON. Raises ValueError if the text holds no tests."""
        return msgspec.json.decode(text, type=cls)

    @classmethod
    def make(
        cls, function: str, solution: str, does: Callable[..., Any], calls: list[list[Any]]
    ) -> HiddenTests:
        """Make the tests. `calls` are the lists of arguments, and the function `does` computes the expected
        value of each call."""
        return cls(function, solution, calls, [does(*arguments) for arguments in calls])

    async def reward(self, source: str, reward_for: RewardFor) -> float:
        """Run the function in `source` in a sandbox, and return its reward, from 0 to 1. Raises SandboxError
        if the sandbox does not work."""
        async with open_sandbox(LIMITS) as box:
            returned = await returns_of(box, source, self.function, self.calls)
        num_passed = sum(map(operator.eq, returned, map(json.dumps, self.returns)))
        return num_passed / len(self.calls) if reward_for == "share" else float(num_passed == len(self.calls))


async def returns_of(
    box: Sandbox, source: str, function: str, calls: list[list[Any]], wait_s: float = WAIT_S
) -> list[str | None]:
    """Call a function of the Python source `source` in an open sandbox, once per list of arguments.

    Returns each value as JSON. A value is None if the call raised an error, took longer than `wait_s`
    seconds, or returned a value that JSON cannot hold."""
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
