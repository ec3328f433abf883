"""Metrics as Parquet: one file per iteration, one row per training step, evaluation or iteration.

Owns the columns `iteration` and `step`; the others are whatever was measured, as float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import pyarrow as pa

from storage import parquet
from storage.files import FileRef
from storage.run_directory import RunDirectory

Kind = Literal["train", "evaluation", "devices"]


def write_metrics(
    run: RunDirectory,
    kind: Kind,
    iteration: int,
    steps: Sequence[Mapping[str, float]],
) -> FileRef:
    """Write the steps of one iteration; for evaluations, `iteration` is the policy version."""
    names = list(dict.fromkeys(name for step in steps for name in step))
    columns: dict[str, pa.Array] = {
        "iteration": pa.array([iteration] * len(steps), pa.int32()),
        "step": pa.array(range(len(steps)), pa.int32()),
    }
    columns |= {name: pa.array([step.get(name) for step in steps], pa.float64()) for name in names}
    return run.relative(parquet.write_table(run.metrics_file(kind, iteration), pa.table(columns)))


def read_metrics(uri: str) -> list[dict[str, float]]:
    """One mapping per step. Raises ValueError with one sentence if the file is missing or broken."""
    rows: list[dict[str, float]] = parquet.read_table(uri).to_pylist()
    return rows
