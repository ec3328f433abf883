"""Outcomes as Parquet: one row per group of a run that has ended, in the folder of the iteration whose
rollout tells of it.

Owns the columns. A curriculum is remembered from these rows; what they mean is in docs/reference/metrics.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa

from storage.files import FileRef
from storage.manifests import Manifest
from storage.run_directory import RunDirectory
from storage.tables import parquet

SCHEMA = pa.schema(
    [
        ("run_id", pa.string()),
        ("group_id", pa.string()),
        ("number", pa.int64()),
        ("source", pa.string()),
        ("task_index", pa.int64()),
        ("task_id", pa.string()),
        ("position", pa.int64()),
        ("need", pa.int32()),
        ("size", pa.int32()),
        ("version", pa.int32()),
        ("verdict", pa.string()),
        ("rewards", pa.list_(pa.float64())),
        ("scores", pa.list_(pa.float64())),
        ("tokens", pa.list_(pa.int64())),
        ("statuses", pa.list_(pa.string())),
    ]
)

NUM_READERS = 16
"""Files that are read at once."""


def write_outcomes(
    run: RunDirectory, iteration: int, rows: Sequence[Mapping[str, Any]], part: str
) -> FileRef:
    """Write rows with the columns of SCHEMA, but for `run_id`, which is the run's. Equal rows give equal
    bytes under the same name. Raises OSError if the storage fails."""
    table = pa.Table.from_pylist([{"run_id": run.run_id, **row} for row in rows], schema=SCHEMA)
    uri = f"{run.partition('outcomes', iteration)}/{part}.parquet"
    return run.relative(parquet.write_table(uri, table))


def outcomes_of(run: RunDirectory, manifest: Manifest) -> list[dict[str, Any]]:
    """Rows that the manifest of a rollout names; raises like `read_outcomes`."""
    uris = [run.path(ref.uri) for ref in manifest.files("outcomes")]
    return [row for uri in uris for row in parquet.read_table(uri, SCHEMA.names, SCHEMA).to_pylist()]


def read_outcomes(run: RunDirectory, before: int) -> Iterator[dict[str, Any]]:
    """Rows that manifests of iterations before this one name. Raises ValueError if a file is missing or
    broken, and StorageError if the storage fails; both name the file."""

    def rows(iteration: int) -> list[dict[str, Any]]:
        manifest = run.read_manifest(iteration, "rollout")
        return outcomes_of(run, manifest) if manifest else []

    with ThreadPoolExecutor(NUM_READERS) as readers:
        for rows_of_file in readers.map(rows, range(before)):
            yield from rows_of_file
