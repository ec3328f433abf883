from pathlib import Path

import pytest

from storage.run_directory import RunDirectory
from tests.sf_core.reports.comparison.comparable_runs import make_run


@pytest.fixture
def two_runs(tmp_path: Path) -> list[RunDirectory]:
    train = {"iterations": 2, "learning_rate": 0.01, "loss": {"policy": "cispo"}}
    return [make_run(tmp_path, "slow", [0.25, 0.5], seed=1), make_run(tmp_path, "fast", [0.5], train=train)]
