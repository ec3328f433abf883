"""Metrics as Parquet: one file per iteration, one row per optimiser step, evaluation or iteration.

Owns the columns `iteration` and `step`; every other column is one metric, as float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import pyarrow as pa

from storage import files
from storage.files import FileRef
from storage.run_directory import RunDirectory
from storage.tables import parquet

Kind = Literal["train", "devices", "evaluation"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Point(NamedTuple):
    """A row of metrics as a point of curves."""

    step: int
    """Position on the x axis: optimiser steps of all iterations for `train`, else the iteration."""
    values: dict[str, float]
    """Metrics by name; never NaN or infinite."""


def write_metrics(
    run: RunDirectory,
    kind: Kind,
    iteration: int,
    steps: Sequence[Mapping[str, float]],
) -> FileRef:
    """Write the rows of one iteration; for evaluations, `iteration` is the policy version."""
    names = list(dict.fromkeys(name for step in steps for name in step))
    columns: dict[str, pa.Array] = {
        "iteration": pa.array([iteration] * len(steps), pa.int32()),
        "step": pa.array(range(len(steps)), pa.int32()),
    }
    for name in names:
        columns[name] = pa.array([step.get(name) for step in steps], pa.float64())
    file = parquet.write_table(run.metrics_file(kind, iteration), pa.table(columns))
    return run.relative(file)


def read_metrics(uri: str) -> list[dict[str, float]]:
    """One mapping per row. Raises ValueError with one sentence if the file is missing or broken."""
    rows: list[dict[str, float]] = parquet.read_table(uri).to_pylist()
    return rows


def newer_points(run: RunDirectory, kind: Kind, after: int, newest: int) -> Iterator[tuple[int, list[Point]]]:
    """Number and rows of each measured iteration from `after` + 1 to `newest`; evaluations have the number of
    the policy version, up to the one that the newest iteration made."""
    last = newest + 1 if kind == "evaluation" else newest
    for number in range(after + 1, last + 1):
        uri = run.metrics_file(kind, number)
        if files.exists(uri):
            rows = read_metrics(uri)
            yield number, [_point(row, len(rows)) for row in rows]


def _point(row: Mapping[str, float | None], num_rows: int) -> Point:
    iteration = int(row["iteration"] or 0)
    step = int(row["step"] or 0)
    values = {}
    for name, value in row.items():
        if name not in ("iteration", "step") and value is not None and math.isfinite(value):
            values[name] = value
    return Point(iteration * num_rows + step, values)
