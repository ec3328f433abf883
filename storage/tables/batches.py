"""Batches as Parquet files: the trajectories of an iteration and the three columns that the filter adds.

Owns these columns. A batch is stored before it is trained on, so that a lost trainer can replay it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage.files import FileRef
from storage.run_directory import RunDirectory
from storage.tables import parquet
from storage.tables.schema import IMAGES, MULTIMODAL_SCHEMA, SCHEMA
from storage.tables.trajectories import read_trajectories

TRAIN = "train"
"""The `decision` of rows that train."""

_ADDED = pa.schema(
    [
        ("advantages", pa.list_(pa.float32())),
        ("weights", pa.list_(pa.float32())),
        ("decision", pa.string()),
    ]
)

BATCH_SCHEMA = pa.unify_schemas([SCHEMA, _ADDED])


def write_batch(
    run: RunDirectory,
    iteration: int,
    trajectories: pa.Table,
    *,
    advantages: Sequence[np.ndarray] | None,
    weights: Sequence[np.ndarray] | None,
    decisions: Sequence[str],
    part: str,
) -> FileRef:
    """Write rows of read_trajectories with the advantage of every token and its weight in the loss (None: the
    train step makes them), and TRAIN or the reason why the row does not train."""
    lengths = trajectories["token_ids"].combine_chunks().value_lengths().to_pylist()
    for name, values in (("advantage", advantages), ("weight", weights)):
        if values is not None and lengths != [len(row) for row in values]:
            raise ValueError(f"batch of iteration {iteration}: expected one {name} per token of every row")
    added = [
        *(_list_column(values, len(lengths)) for values in (advantages, weights)),
        pa.array(decisions, pa.string()),
    ]
    # whether the policy sees
    schema_of_rows = MULTIMODAL_SCHEMA if IMAGES.name in trajectories.column_names else SCHEMA
    columns = [trajectories[name] for name in schema_of_rows.names]
    table = pa.table([*columns, *added], schema=pa.unify_schemas([schema_of_rows, _ADDED]))
    uri = f"{run.partition('batches', iteration)}/{part}.parquet"
    return run.relative(parquet.write_table(uri, table))


def read_batch(uri: str, columns: list[str] | None = None) -> pa.Table:
    """Like read_trajectories, with the columns `advantages`, `weights` and `decision`."""
    return read_trajectories(uri, columns, BATCH_SCHEMA.append(IMAGES))


def select_training_rows(batch: pa.Table) -> pa.Table:
    """The rows of a batch that train."""
    return batch.filter(pc.equal(batch["decision"], TRAIN))


def _list_column(rows: Sequence[np.ndarray] | None, num_rows: int) -> pa.Array:
    if rows is None:
        return pa.nulls(num_rows, pa.list_(pa.float32()))
    return parquet.list_array(rows, np.float32)
