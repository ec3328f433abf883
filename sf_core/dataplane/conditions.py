"""Waiting for a condition on one event loop, as long polls do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class Condition:
    """Wakes all waiting coroutines; each of them checks its own predicate again."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self) -> None:
        """Return at the next `notify`."""
        await self._event.wait()

    async def until(self, predicate: Callable[[], Any], timeout_s: float | None = None) -> bool:
        """True as soon as the predicate holds; False if it does not hold within the timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                while not predicate():
                    await self._event.wait()
        except TimeoutError:
            return False
        return True
