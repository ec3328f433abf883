"""Trajectories as Parquet files, one folder per iteration.

Owns their encoding from rows to Arrow columns and back. storage/tables/schema.py defines the columns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from itertools import chain
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from storage.files import FileRef
from storage.media import ImageSpan
from storage.run_directory import RunDirectory
from storage.tables import parquet
from storage.tables.schema import (
    IMAGE,
    IMAGES,
    MULTIMODAL_SCHEMA,
    NOT_SAMPLED,
    SCHEMA,
    TURN,
    Trajectory,
    TurnSpan,
)

TrajectoryKind = Literal["trajectories", "evaluations", "opened"]
"""Folder of the run directory: sessions of iterations, of evaluations, or opened by agents themselves."""

_BYTES_PER_TOKEN = 4 + 1 + 4 + 4
"""Size of one token in the four per-token lists, before compression."""


def write_trajectories(
    run: RunDirectory,
    iteration: int,
    rows: Iterable[Trajectory],
    part: str,
    kind: TrajectoryKind = "trajectories",
    *,
    is_multimodal: bool = False,
) -> FileRef:
    """Write one part of an iteration (of a policy version, for other kinds). `part` names the shard and the
    attempt; the same part of the same iteration is the same file. Rows are consumed as they are written, so
    that only one row group of an iterator is in memory. `is_multimodal`: the policy is shown images, and the
    file has the column IMAGES."""
    uri = f"{run.partition(kind, iteration)}/{part}.parquet"
    tables = (to_table(run.run_id, group, is_multimodal=is_multimodal) for group in _row_groups(rows))
    return run.relative(parquet.write_tables(uri, MULTIMODAL_SCHEMA if is_multimodal else SCHEMA, tables))


def read_trajectories(
    uri: str, columns: list[str] | None = None, schema: pa.Schema = MULTIMODAL_SCHEMA
) -> pa.Table:
    """Read one file, and add the column `iteration` from the name of its folder. IMAGES is left out where it
    is missing.

    Raises ValueError with one sentence if the file is missing, broken, has a column of another type than
    `schema` says, or is in no such folder.
    """
    number = iteration_of(uri)
    stored_columns = None if columns is None else [name for name in columns if name != "iteration"]
    table = parquet.read_table(uri, stored_columns, schema, [IMAGES.name])
    if columns is not None and "iteration" not in columns:
        return table
    iteration = pa.array(np.full(len(table), number, np.int32))
    return table.add_column(min(1, table.num_columns), "iteration", iteration)


def iteration_of(uri: str) -> int:
    """Iteration of a file, from the name of its folder. Raises ValueError if that names none."""
    match = re.search(r"/iteration=(\d+)/[^/]*$", uri)
    if match is None:
        raise ValueError(f"{uri}: expected a file in a folder iteration=K")
    return int(match[1])


def iter_trajectories(
    uri: str, max_rows: int, columns: Sequence[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """Read one file in the columns of MULTIMODAL_SCHEMA, or some of them, `max_rows` at a time. IMAGES is
    left out where it is missing. Raises ValueError if it cannot be read."""
    names = MULTIMODAL_SCHEMA.names if columns is None else list(columns)
    for batch in parquet.iter_batches(uri, max_rows, names, MULTIMODAL_SCHEMA, [IMAGES.name]):
        present = [name for name in names if name in batch.schema.names]
        schema = pa.schema([MULTIMODAL_SCHEMA.field(name) for name in present])
        # Parquet has its own name for the elements of a list
        yield batch.select(present).cast(schema)


def first_rows(session_ids: pa.ChunkedArray) -> np.ndarray:
    """Index of every session's first row, in order, to count values that its branches repeat only once."""
    codes = session_ids.combine_chunks().dictionary_encode().indices.to_numpy()
    return np.sort(np.unique(codes, return_index=True)[1])


def to_table(run_id: str, rows: Sequence[Trajectory], *, is_multimodal: bool = False) -> pa.Table:
    """Raises ValueError if the arrays of a row differ in length, or if a row has images and its policy does
    not see."""
    for row in rows:
        lengths = {len(row.token_ids), len(row.loss_mask), len(row.logprobs), len(row.policy_versions)}
        if len(lengths) > 1:
            raise ValueError(
                f"branch {row.branch_id} of session {row.session_id}: token_ids, loss_mask, logprobs and "
                f"policy_versions must have equal lengths, got {sorted(lengths)}"
            )
    versions = [np.asarray(row.policy_versions) for row in rows]
    not_sampled = [row == NOT_SAMPLED for row in versions]
    sampled = [row[~missing] for row, missing in zip(versions, not_sampled, strict=True)]
    columns: dict[str, Any] = {
        "run_id": [run_id] * len(rows),
        "token_ids": parquet.list_array([row.token_ids for row in rows], np.int32),
        "loss_mask": parquet.list_array([row.loss_mask for row in rows], np.bool_),
        "logprobs": parquet.list_array([row.logprobs for row in rows], np.float32, not_sampled),
        "policy_versions": parquet.list_array(versions, np.int32, not_sampled),
        "turns": _structs(TURN, [row.turns for row in rows]),
        "reward_parts": [
            [{"name": name, "value": value} for name, value in row.reward_parts.items()] for row in rows
        ],
        "min_version": [int(row.min()) if len(row) else None for row in sampled],
        "max_version": [int(row.max()) if len(row) else None for row in sampled],
        "started_at": [round(row.started_at * 1e6) for row in rows],
        "finished_at": [round(row.finished_at * 1e6) for row in rows],
    }
    schema = MULTIMODAL_SCHEMA if is_multimodal else SCHEMA
    if is_multimodal:
        columns[IMAGES.name] = _structs(IMAGE, [row.images for row in rows])
    elif row_seeing := next((row for row in rows if row.images), None):
        raise ValueError(
            f"branch {row_seeing.branch_id} of session {row_seeing.session_id} has images, "
            "but its policy does not see images"
        )
    plain = {name: [getattr(row, name) for row in rows] for name in schema.names if name not in columns}
    return pa.Table.from_pydict(columns | plain, schema=schema)


def to_rows(table: pa.Table) -> list[Trajectory]:
    """Inverse of to_table; other columns are ignored."""
    names = [field.name for field in fields(Trajectory)]
    columns: dict[str, Any] = {
        "token_ids": parquet.numpy_rows(table["token_ids"]),
        "loss_mask": parquet.numpy_rows(table["loss_mask"]),
        "logprobs": parquet.numpy_rows(table["logprobs"], float("nan")),
        "policy_versions": parquet.numpy_rows(table["policy_versions"], NOT_SAMPLED),
        "turns": [[TurnSpan(**turn) for turn in turns] for turns in table["turns"].to_pylist()],
        "reward_parts": [
            {part["name"]: part["value"] for part in parts} for parts in table["reward_parts"].to_pylist()
        ],
        "started_at": _seconds(table["started_at"]),
        "finished_at": _seconds(table["finished_at"]),
        "images": images_of(table),
    }
    values = [columns[name] if name in columns else table[name].to_pylist() for name in names]
    rows = zip(*values, strict=True)
    return [Trajectory(*row) for row in rows]


def images_of(table: pa.Table) -> list[tuple[ImageSpan, ...]]:
    """The images of each row; none where the table has no column of them."""
    if IMAGES.name not in table.column_names:
        return [()] * len(table)
    return [tuple(ImageSpan(**image) for image in images) for images in table[IMAGES.name].to_pylist()]


def _row_groups(rows: Iterable[Trajectory]) -> Iterator[list[Trajectory]]:
    group: list[Trajectory] = []
    size = 0
    for row in rows:
        group.append(row)
        texts = row.messages, row.tools, row.output
        size += len(row.token_ids) * _BYTES_PER_TOKEN + sum(len(text or "") for text in texts)
        if size >= parquet.ROW_GROUP_BYTES:
            yield group
            group = []
            size = 0
    if group:
        yield group


def _structs(kind: pa.StructType, rows: Sequence[Sequence[object]]) -> pa.ListArray:
    """A list for each row, of structs with the attributes of its elements."""
    elements = list(chain.from_iterable(rows))
    children = []
    for field in kind:
        values = [getattr(element, field.name) for element in elements]
        children.append(pa.array(values, field.type))
    structs = pa.StructArray.from_arrays(children, fields=list(kind))
    return pa.ListArray.from_arrays(parquet.offsets(rows), structs)


def _seconds(column: pa.ChunkedArray) -> list[float]:
    return [microseconds / 1e6 for microseconds in column.cast(pa.int64()).to_pylist()]
