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

DRIVER = Path(__file__).with_name("driver.py").read_text(encoding="utf-8")

CPU_S = 1.0
WAIT_S = 5.0
"""Time limits of one call, in seconds: CPU time and wall-clock time. The second limit is larger, because a
busy machine needs more wall-clock time."""

RUN_S = 30.0
"""Time limit for all calls together, in seconds. Calls that do not start in time fail."""

LIMITS = SandboxLimits(memory_mb=256, disk_mb=8, processes=16, open_files=64, cpu_s=10, output_mb=1)
"""Limits of the sandbox in which `HiddenTests` runs functions."""

RewardFor = Literal["share", "all"]
"""`share`: the reward is the share of hidden tests that pass. `all`: the reward is 1 if all pass, else 0."""


class HiddenTests(msgspec.Struct, frozen=True):
    """Tests for a function that a model writes. Each test is a call with an expected value.

    Store the tests as text in `Task.answer`, which the policy does not see. The sandbox does not contain the
    expected values.

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
    """The arguments of each call, as JSON values."""
    returns: list[Any]
    """The expected value of each call, as a JSON value."""

    def to_text(self) -> str:
        """The tests as JSON."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_text(cls, text: str) -> HiddenTests:
        """Read the tests from JSON. Raises ValueError if the text does not contain tests."""
        return msgspec.json.decode(text, type=cls)

    @classmethod
    def make(
        cls, function: str, solution: str, does: Callable[..., Any], calls: list[list[Any]]
    ) -> HiddenTests:
        """Make the tests. `calls` has one list of arguments per call. The function `does` computes the
        expected value of each call."""
        return cls(function, solution, calls, [does(*arguments) for arguments in calls])

    async def reward(self, source: str, reward_for: RewardFor) -> float:
        """Run the function in a sandbox, and return a reward from 0 to 1. `source` is the Python source of
        the function. Raises SandboxError if the sandbox fails."""
        async with open_sandbox(LIMITS) as box:
            returned = await returns_of(box, source, self.function, self.calls)
        expected = map(json.dumps, self.returns)
        num_passed = sum(map(operator.eq, returned, expected))
        if reward_for == "share":
            return num_passed / len(self.calls)
        return float(num_passed == len(self.calls))


async def returns_of(
    box: Sandbox, source: str, function: str, calls: list[list[Any]], wait_s: float = WAIT_S
) -> list[str | None]:
    """Call a function in an open sandbox, once per list of arguments in `calls`. `source` is Python source
    that defines the function.

    Returns the value of each call as JSON text. The entry of a call is None if the call raised an error, took
    longer than `wait_s` seconds, or returned a value that JSON cannot represent."""
    job = {"source": source, "function": function, "calls": calls, "cpu_s": CPU_S, "wait_s": wait_s}
    ended = await box.run_python(DRIVER, stdin=json.dumps(job), timeout_s=RUN_S)
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
