"""Scores as Parquet: what a teacher at a URL said of the rows of a batch. HTTP does not answer twice bit for
bit, so that a train step that is repeated reads what was said.

Owns the columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from storage.files import FileRef
from storage.run_directory import RunDirectory
from storage.tables import parquet

KEY = ("session_id", "branch_id")
SCHEMA = pa.schema([*((name, pa.string()) for name in KEY), ("teacher_logprobs", pa.list_(pa.float32()))])

Logprobs = Sequence[npt.NDArray[np.float32]]


def write_scores(run: RunDirectory, iteration: int, rows: pa.Table, logprobs: Logprobs, part: str) -> FileRef:
    """Write a log-prob for every token of the rows of a batch, in their order; 0 where nothing is trained."""
    columns = [*(rows[name] for name in KEY), parquet.list_array(logprobs, np.float32)]
    uri = f"{run.partition('scores', iteration)}/{part}.parquet"
    return run.relative(parquet.write_table(uri, pa.table(columns, schema=SCHEMA)))


def read_scores(uri: str, rows: pa.Table) -> pa.ChunkedArray:
    """The column `teacher_logprobs` for these rows of a batch. Raises ValueError if the file is missing,
    broken, or of other rows."""
    table = parquet.read_table(uri, SCHEMA.names, SCHEMA)
    if any(table[name].to_pylist() != rows[name].to_pylist() for name in KEY):
        raise ValueError(f"{uri}: expected one row for each row of its batch, in the same order")
    return table["teacher_logprobs"]
