"""Runs in sandboxes for tests, by the maker that a test is given (conftest.py)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from sf_core.agents.sandbox import Ended, Sandbox, open_sandbox, why_no_sandbox
from sf_core.config.programs import SandboxLimits
from tests.bench.waits import patience

image: str | None = None
"""The image of the sandboxes, which podman makes then; None: bubblewrap makes them."""

Result = TypeVar("Result")


def need_sandbox() -> None:
    """Skip a test where no sandbox can be made; in CI it fails."""
    if reason := why_no_sandbox():
        if os.environ.get("CI") == "true":
            raise FileNotFoundError(f"{reason}; .ci/run installs Debian's bubblewrap")
        pytest.skip(reason)


def inside(
    work: Callable[[Sandbox], Awaitable[Result]], limits: SandboxLimits | None = None, **settings: Any
) -> Result:
    """What this function returns that is given a sandbox."""

    return asyncio.run(asyncio.wait_for(opened(work, limits, **settings), patience()))


async def opened(
    work: Callable[[Sandbox], Awaitable[Result]], limits: SandboxLimits | None = None, **settings: Any
) -> Result:
    async with open_sandbox(made(limits or SandboxLimits()), **settings) as box:
        return await work(box)


def made(limits: SandboxLimits) -> SandboxLimits:
    """The limits of a sandbox by the maker of this test."""
    return limits.model_copy(update={"image": image}) if image else limits


def run(
    *words: str, limits: SandboxLimits | None = None, timeout_s: float | None = None, **settings: Any
) -> Ended:
    """One command in a sandbox of its own."""
    return inside(lambda box: box.run(words, timeout_s=timeout_s or patience()), limits, **settings)


def shell(script: str, **settings: Any) -> Ended:
    return run("sh", "-c", script, **settings)
