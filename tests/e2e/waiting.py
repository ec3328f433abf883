"""How end-to-end tests wait for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def wait_until(probe: Callable[[], Any], what: str, timeout_s: float = 60.0, every_s: float = 0.005) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := probe():
            return value
        time.sleep(every_s)
    raise AssertionError(f"waited {timeout_s:.0f} s for {what}")
