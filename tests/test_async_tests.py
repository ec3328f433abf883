from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.bench import ROOT
from tests.bench.waits import patience

TESTS = """
import asyncio
import pytest
from hypothesis import given, strategies as st

async def nothing():
    await asyncio.sleep(0)

async def test_passes():
    await nothing()

async def test_fails():
    await nothing()
    assert False

@given(st.integers())
async def test_example_fails(number):
    await nothing()
    assert number < 5

async def test_forgets_to_await():
    nothing()

async def test_callback_fails():
    asyncio.get_running_loop().call_soon(lambda: 1 / 0)
    await nothing()

async def test_task_fails():
    async def fail():
        raise ArithmeticError
    asyncio.ensure_future(fail())
    await nothing()
    await nothing()

@pytest.mark.timeout(1)
async def test_hangs():
    await asyncio.get_running_loop().create_future()
"""


def test_an_async_test_fails_by_itself_in_the_background_and_if_it_hangs(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS, encoding="utf-8")
    options = ["-c", str(ROOT / "pyproject.toml"), "-p", "tests.bench.fixtures", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-rA", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patience(),
        encoding="utf-8",
    )
    failed = re.findall(r"^FAILED \S+::test_(\w+)", done.stdout, re.M)
    assert failed == [name for name in re.findall(r"async def test_(\w+)", TESTS) if name != "passes"]
    assert re.findall(r"^PASSED \S+::test_(\w+)", done.stdout, re.M) == ["passes"]
