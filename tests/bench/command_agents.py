"""Tasks for commands as agents, and what they leave."""

from __future__ import annotations

from pathlib import Path

from sf_core.types import Endpoint, Task
from storage.tables.schema import Trajectory
from storage.tables.trajectories import read_trajectories, to_rows
from tests.bench.dataplane.planes import ServedPlane

TASK = Task("t-1", "sums", "What is 6*7?\n\N{GREEK SMALL LETTER PI}", "forty-two", {"level": 3})
ENDPOINT = Endpoint("http://127.0.0.1:9/sessions/s-1/v1", "key-of-the-run", "policy")


def rows_of(plane: ServedPlane) -> list[Trajectory]:
    sealed = plane.post("/runs/run/batches/0/seal", {"attempt": 1})
    return [
        row
        for file in sealed["files"]
        for row in to_rows(read_trajectories(str(Path(plane.run_dir, "run", file["uri"]))))
    ]
