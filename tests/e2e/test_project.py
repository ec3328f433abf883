"""The project that `sf init` writes trains at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from sf_core.stages.preflight.stored_config import read_stored_config
from tests.bench.stacks.invariants import check_result
from tests.bench.stacks.quickstart import options, sf


# tests/sf_core/cli/test_project.py runs the tests of a project
@pytest.mark.nightly
def test_a_new_project_is_trained_as_its_page_says(tmp_path: Path) -> None:
    made = sf(tmp_path, "init", "till-agent")
    assert made.returncode == 0, made.stderr
    short = {"policy__warmstart__steps": 30, "train__iterations": 2, "evaluate__num_tasks": 8}
    smaller = {"rollout__groups_per_batch": 4, "rollout__group_size": 4}
    settings = options(run_id="till", **short, **smaller)
    trained = sf(tmp_path / "till-agent", "train", "train.yaml", *settings)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    check_result(read_stored_config(str(tmp_path / "till-agent" / "runs" / "till")))
