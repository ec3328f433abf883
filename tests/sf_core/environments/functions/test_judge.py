"""Functions that models write, run in the sandbox, and what their tests make of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sf_core.environments.functions.judge import LIMITS, WAIT_S, HiddenTests, returns_of
from tests.bench.sandboxes import inside, need_sandbox
from tests.bench.waits import patience

SECRET = 735_918_264
"""A value that nobody can guess who has not seen it."""


def returned(source: str, *calls: list[Any], wait_s: float = WAIT_S) -> list[str | None]:
    return inside(lambda box: returns_of(box, source, "f", list(calls), wait_s), limits=LIMITS)


async def reward(source: str, returns: list[Any], calls: list[list[Any]] | None = None) -> float:
    need_sandbox()
    tests = HiddenTests("f", "", calls or [[number] for number in range(len(returns))], returns)
    return await tests.reward(source, "share")


def test_values_come_back_as_json() -> None:
    assert returned("f = lambda *values: values", [1, "a"], [], [[None, 2.5, True]]) == [
        '[1, "a"]',
        "[]",
        "[[null, 2.5, true]]",
    ]


def test_calls_that_crash_hang_or_return_no_value_leave_the_others_as_they_are() -> None:
    source = """
import os, time
def f(what):
    if what == "crash": os.abort()
    if what == "exit": raise SystemExit
    if what == "hang": time.sleep(1000)
    if what == "set": return {1}
    return what
"""
    wait_s = patience(0.5)
    found = returned(source, ["crash"], ["exit"], ["hang"], ["set"], ["fine"], wait_s=wait_s)
    assert found == [None, None, None, None, '"fine"']


@pytest.mark.parametrize(
    "source", ["", "def f(", "g = 1", "f = 1", "while True: pass", "import os; os._exit(0)"]
)
def test_what_is_no_function_returns_nothing(source: str) -> None:
    assert returned(source, [1]) == [None]


def test_calls_do_not_see_what_others_have_left_in_memory() -> None:
    assert returned("seen = []\ndef f(x):\n    seen.append(x)\n    return seen", [1], [2]) == ["[1]", "[2]"]


async def test_a_function_that_prints_is_as_good_as_another() -> None:
    assert await reward("def f(x):\n    print([0, 5])\n    return x", [0, 1]) == 1.0


async def test_another_type_is_another_value() -> None:
    assert await reward("f = lambda x: x", [1, True, "1"], [[1.0], [1], [1]]) == 0.0


async def test_the_share_and_all_or_nothing() -> None:
    need_sandbox()
    tests = HiddenTests("f", "", [[0], [1], [2], [3]], [0, 1, 4, 9])
    assert await tests.reward("f = lambda x: x", "share") == 0.5
    assert await tests.reward("f = lambda x: x", "all") == 0.0
    assert await tests.reward("f = lambda x: x * x", "all") == 1.0


WRITE = """
import os
def write():
    for number in range(3, 64):
        try: os.write(number, LINES)
        except OSError: pass
"""
FORGERIES = {
    "answers before the driver's": f"{WRITE}\nwrite()\nos._exit(0)",
    "answers for others": f"{WRITE}\ndef f(x): write()",
}
LINES = b"\n".join(
    [
        *(json.dumps([index, guess]).encode() for index in (0, 1, -1, 99, "0") for guess in (None, 7, [7])),
        b"[" * 100_000,
        b"[0, " + b"9" * 10_000 + b"]",
        b'{"0": 7}',
        b"[0]",
        b"\xff\x00",
        b"",
    ]
)


@pytest.mark.parametrize("name", FORGERIES)
async def test_what_is_written_past_the_driver_is_a_guess_at_most(name: str) -> None:
    assert await reward(f"LINES = {LINES!r}\n{FORGERIES[name]}", [SECRET, SECRET + 1]) == 0.0


HEAD = str(SECRET)[:4]
TAIL = str(SECRET)[4:]
SEARCH = f"""
import glob, os
def opened(name):
    # one that others write to might never say a word
    return os.fdopen(os.open(name, os.O_RDONLY | os.O_NONBLOCK), "rb")
def f(x):
    for place in ("/proc/[0-9]*/*", "/proc/[0-9]*/fd/*", "**", "/tmp/**"):
        for name in glob.glob(place, recursive=True):
            try: content = opened(name).read(1 << 20)
            except OSError: continue
            if b"{HEAD}" + b"{TAIL}" in content: return int("{HEAD}" + "{TAIL}")
"""


async def test_what_a_function_should_return_is_nowhere_in_the_sandbox() -> None:
    assert await reward(SEARCH, [SECRET], [[1]]) == 0.0
    # it does find what the function is called with
    assert await reward(SEARCH, [SECRET], [[SECRET]]) == 1.0
