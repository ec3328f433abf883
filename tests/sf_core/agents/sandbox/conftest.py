from __future__ import annotations

import pytest

from tests.sf_core.agents.sandbox.inside import need_sandbox


@pytest.fixture(autouse=True)
def sandbox() -> None:
    need_sandbox()
