"""Making version 0: what is told about it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import flows.warmstart as module
from sf_core.config import RunConfig
from sf_core.stages.run import RunRef


@pytest.mark.parametrize(
    "policy, told",
    [
        ({}, "creating version 0: the built-in policy, and its warm start"),
        ({"warmstart": None}, "creating version 0: the built-in policy"),
        ({"warmstart": {"steps": 0}}, "creating version 0: the built-in policy"),
    ],
)
def test_a_warm_start_is_told_only_if_there_is_one(
    monkeypatch: pytest.MonkeyPatch, policy: dict[str, Any], told: str
) -> None:
    lines: list[str] = []
    directory = SimpleNamespace(read_manifest=lambda *_: None, start_dir="")
    monkeypatch.setattr(module, "OpenRun", lambda run: SimpleNamespace(directory=directory))
    monkeypatch.setattr(module, "log_progress", lines.append)
    monkeypatch.setattr(module, "submit", lambda *_, **__: None)
    monkeypatch.setattr(module, "result_of", lambda *_: None)
    module.start_policy(RunConfig.model_validate({"policy": policy}), RunRef("told", "runs/told", "", 1), ())
    assert lines == [told, "version 0 is ready"]
