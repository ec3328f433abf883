"""docs/operations.md: alerts name existing metrics, and settings are those that we set."""

from __future__ import annotations

import re

from sf_core.dataplane.control.metrics import PlaneMetrics
from sf_core.dataplane.gateway.metrics import Metrics
from sf_core.dataplane.sessions.memory import Memory
from sf_core.scheduling.worker import DASK_SETTINGS
from tests.e2e.conftest import ROOT

PAGE = (ROOT / "docs" / "operations.md").read_text()


def test_every_figure_in_the_docs_is_exported() -> None:
    exported = Metrics(PlaneMetrics({}, Memory())).text().decode()
    families = set(re.findall(r"^# TYPE (\w+)", exported, re.MULTILINE))
    named = set(re.findall(r"\bsf_[a-z_]+\b(?!/|\.)", PAGE))
    assert {name.removesuffix("_bucket") for name in named} - {"sf_core"} <= families


def test_a_plain_dask_scheduler_is_told_to_be_set_up_as_ours_is() -> None:
    ours = {name: value for name, value in DASK_SETTINGS.items() if "__SCHEDULER__" in name}
    assert dict(re.findall(r"^(DASK_DISTRIBUTED__SCHEDULER__\w+)=(\S+)$", PAGE, re.MULTILINE)) == ours
