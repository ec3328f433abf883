"""Parquet as this project writes it, and numpy rows as Arrow list columns.

Owns compression, the schema version and the checks of a file. Knows no column by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from io import BytesIO
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from storage import files
from storage.files import FileRef

SCHEMA_VERSION = "1"
_VERSION_KEY = b"seamlessflow.schema"
METADATA = {_VERSION_KEY: SCHEMA_VERSION.encode()}
_READ_BYTES = 2**20


def write_table(uri: str, table: pa.Table) -> FileRef:
    """Equal tables give equal bytes."""
    # a dictionary pays for names that repeat, not for numbers and unique texts
    names = [field.name for field in table.schema if field.type == pa.string() and field.name != "messages"]
    buffer = BytesIO()
    pq.write_table(
        table.replace_schema_metadata(METADATA),
        buffer,
        compression="zstd",
        use_dictionary=names,
        write_statistics=True,
    )
    return files.write_atomic(uri, buffer.getvalue())


def read_table(uri: str, columns: list[str] | None = None) -> pa.Table:
    """One file. Raises ValueError with one sentence if it is missing, broken or of another schema version."""
    try:
        table = pq.ParquetFile(BytesIO(files.read_bytes(uri))).read(columns)
    except FileNotFoundError:
        raise ValueError(f"{uri}: no such file") from None
    except pa.ArrowInvalid as error:
        raise ValueError(f"{uri}: not a complete Parquet file: {error}") from None
    _check_version(uri, table.schema)
    return table


def iter_batches(uri: str, max_rows: int) -> Iterator[pa.RecordBatch]:
    """One file, `max_rows` at a time, never whole in memory. Raises ValueError like `read_table`."""
    fs, path = files.open_fs(uri)
    try:
        with fs.open(path, "rb") as file:
            reader = pq.ParquetFile(file, pre_buffer=False, buffer_size=_READ_BYTES)
            _check_version(uri, reader.schema_arrow)
            yield from reader.iter_batches(max_rows)
    except FileNotFoundError:
        raise ValueError(f"{uri}: no such file") from None
    except pa.ArrowInvalid as error:
        raise ValueError(f"{uri}: not a complete Parquet file: {error}") from None


def offsets(rows: Sequence[Sized]) -> pa.Int32Array:
    """Where each list begins, and the end of the last."""
    ends = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([len(row) for row in rows], out=ends[1:])
    return pa.array(ends)


def list_array(
    rows: Sequence[np.ndarray], dtype: Any, missing: Sequence[np.ndarray] | None = None
) -> pa.ListArray:
    """One list per row; `missing` marks the elements that become null."""
    values = _concatenate(rows, dtype)
    mask = None if missing is None else _concatenate(missing, np.bool_)
    return pa.ListArray.from_arrays(offsets(rows), pa.array(values, mask=mask))


def numpy_rows(column: pa.ChunkedArray, fill: Any = None) -> list[np.ndarray]:
    """One array per row, views of one buffer; null elements become `fill`."""
    lists = column.combine_chunks()
    values = lists.flatten()
    if fill is not None:
        values = values.fill_null(fill)
    flat = values.to_numpy(zero_copy_only=False)
    ends = np.cumsum(lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False))
    return np.split(flat, ends[:-1]) if len(lists) else []


def _check_version(uri: str, schema: pa.Schema) -> None:
    version = (schema.metadata or {}).get(_VERSION_KEY, b"none").decode()
    if version != SCHEMA_VERSION:
        raise ValueError(f"{uri}: schema version is {version}, this code reads {SCHEMA_VERSION}")


def _concatenate(rows: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    if not rows:
        return np.empty(0, dtype)
    return np.concatenate(rows).astype(dtype, copy=False)
