from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.bench.repositories import rows_of


@pytest.fixture
def row(generated: Path) -> dict[str, Any]:
    """An instance whose tests are in a folder of their own."""
    return next(row for row in rows_of(generated) if row["repo"] == "acme/lists")


@pytest.fixture
def honest(row: dict[str, Any]) -> float:
    """What it earns to change nothing."""
    failing, passing = (len(json.loads(row[name])) for name in ("FAIL_TO_PASS", "PASS_TO_PASS"))
    return passing / (failing + passing)
