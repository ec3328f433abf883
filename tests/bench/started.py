"""Runs that start from the folder of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sf_core.config import RunConfig
from sf_core.stages.run import RunRef
from sf_core.stages.start import start
from storage.run_directory import RunDirectory
from tests.bench.runs import configure


def from_model(run: RunDirectory, model: Path, **sections: Any) -> RunConfig:
    root = run.uri.rpartition("/")[0]
    return configure(run, policy={"model": str(model)}, storage={"root": root}, **sections)


def started(run: RunDirectory) -> dict[str, Any]:
    return start(RunRef(run.run_id, run.uri, dataplane_url="", attempt=1))
