from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def _one_thread(one_thread: None) -> None:
    """Models of these tests compute with one thread."""
