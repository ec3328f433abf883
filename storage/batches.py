"""Batches as Parquet files: the trajectories of an iteration and the three columns that the filter adds.

Owns these columns. A batch is stored before it is trained on, so that a lost trainer can replay it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from storage import parquet
from storage.files import FileRef
from storage.run_directory import RunDirectory
from storage.trajectories import SCHEMA, read_trajectories

BATCH_SCHEMA = pa.unify_schemas(
    [
        SCHEMA,
        pa.schema(
            [
                ("advantages", pa.list_(pa.float32())),
                ("weight", pa.float64()),
                ("decision", pa.string()),
            ]
        ),
    ]
)


def write_batch(
    run: RunDirectory,
    iteration: int,
    trajectories: pa.Table,
    *,
    advantages: Sequence[np.ndarray],
    weights: Sequence[float],
    decisions: Sequence[str],
    part: str,
) -> FileRef:
    """Write rows of read_trajectories with one advantage per token, the row's weight in the loss, and
    "train" or the reason why the row does not train."""
    lengths = trajectories["token_ids"].combine_chunks().value_lengths().to_pylist()
    if lengths != [len(row) for row in advantages]:
        raise ValueError(f"batch of iteration {iteration}: expected one advantage per token of every row")
    added = [
        parquet.list_array(advantages, np.float32),
        pa.array(weights, pa.float64()),
        pa.array(decisions, pa.string()),
    ]
    columns = [trajectories[name] for name in SCHEMA.names]
    table = pa.table([*columns, *added], schema=BATCH_SCHEMA)
    uri = f"{run.partition('batches', iteration)}/{part}.parquet"
    return run.relative(parquet.write_table(uri, table))


def read_batch(uri: str, columns: list[str] | None = None) -> pa.Table:
    """Like read_trajectories, with the columns `advantages`, `weight` and `decision`."""
    return read_trajectories(uri, columns, BATCH_SCHEMA)
