"""docs/operations.md: alerts are about figures that there are."""

from __future__ import annotations

import re

from sf_core.dataplane.memory import Memory
from sf_core.dataplane.metrics import MemoryUse, Metrics, Runs
from tests.e2e.conftest import ROOT


def test_every_figure_in_the_docs_is_exported() -> None:
    exported = Metrics(Runs({}), MemoryUse(Memory())).text().decode()
    families = set(re.findall(r"^# TYPE (\w+)", exported, re.MULTILINE))
    named = set(re.findall(r"\bsf_[a-z_]+\b(?!/|\.)", (ROOT / "docs" / "operations.md").read_text()))
    assert {name.removesuffix("_bucket") for name in named} - {"sf_core"} <= families
