"""Notebooks of the examples, on a small run; tests/e2e has them on a run that learned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sf_core.config import RunConfig
from storage.run_directory import RunDirectory
from tests.bench.notebooks import ROOT, execute
from tests.bench.recorded_run import record

NOTEBOOKS = sorted((ROOT / "examples").rglob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_short_and_has_no_outputs(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert len(notebook["cells"]) <= 10
    for cell in notebook["cells"]:
        assert not cell.get("outputs") and cell.get("execution_count") is None and not cell["metadata"]


def test_two_runs_are_read(tmp_path: Path, small_policy: str) -> None:
    record(RunDirectory(str(tmp_path / "runs" / "quickstart")), small_policy)
    slower = RunConfig.model_validate({"run_id": "slower", "train": {"learning_rate": 0.0003}})
    RunDirectory(str(tmp_path / "runs" / "slower")).write_config(slower)
    _, _, ranked, turns, tokens, failures, evaluations, settings = execute("read_a_run.ipynb", tmp_path)
    assert "run-1.g0.1" in ranked and "timeout" in ranked
    assert "assistant" in turns and "0.740818" in tokens
    assert "timeout     1" in failures and "max_lag" in failures
    assert "0.75" in evaluations
    assert "train.learning_rate" in settings and "0.0003" in settings and "rollout" not in settings
