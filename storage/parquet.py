"""Reads and writes this project's Parquet files, and converts NumPy rows to Arrow list columns.

Owns compression, the schema version and the validation of a file. Knows nothing of what columns mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from storage import files
from storage.files import FileRef

SCHEMA_VERSION = 4
"""Version of written files. Older versions are read too; tests/data has one folder per version."""
_VERSION_KEY = b"seamlessflow.schema"
METADATA = {_VERSION_KEY: str(SCHEMA_VERSION).encode()}
ROW_GROUP_BYTES = 32 * 2**20
"""Approximate size of a row group before compression; a writer or reader holds one at a time."""
_READ_BYTES = 2**20
_Rows = TypeVar("_Rows", pa.Table, pa.RecordBatch)


def write_table(uri: str, table: pa.Table) -> FileRef:
    """Write a table in row groups; equal tables give equal bytes."""
    rows = max(1, len(table) * ROW_GROUP_BYTES // max(1, table.nbytes))
    return write_tables(uri, table.schema, (table.slice(at, rows) for at in range(0, len(table), rows)))


def write_tables(uri: str, schema: pa.Schema, tables: Iterable[pa.Table]) -> FileRef:
    """Write one row group per table as the tables arrive, so that never all of them are in memory."""
    with files.writer(uri) as file:
        # a dictionary makes repeated names faster to write and read; repeated numbers get as small by zstd
        # alone: benchmarks/storage.py
        texts = ("messages", "output")
        names = [field.name for field in schema if field.type == pa.string() and field.name not in texts]
        with pq.ParquetWriter(
            file,
            schema.with_metadata(METADATA),
            compression="zstd",
            use_dictionary=names,
            write_statistics=True,
            write_page_checksum=True,
        ) as writer:
            for table in tables:
                writer.write_table(table, row_group_size=max(1, len(table)))
        return file.ref(uri)


def read_table(uri: str, columns: list[str] | None = None, schema: pa.Schema | None = None) -> pa.Table:
    """Read one file; with `columns`, only their bytes. Columns and struct fields added after the file's
    schema version are read as null. Raises ValueError if the file is missing, broken, lacks a column, has
    one of another type than in `schema`, or is of a newer schema version."""
    with _opened(uri, pre_buffer=True) as reader:
        absent = _check_columns(uri, reader.schema_arrow, columns, schema)
        return _fill_in(reader.read(_stored(columns, absent)), absent, columns, schema)


def iter_batches(
    uri: str, max_rows: int, columns: list[str] | None = None, schema: pa.Schema | None = None
) -> Iterator[pa.RecordBatch]:
    """Read one file, `max_rows` at a time, never whole in memory. Raises ValueError like `read_table`."""
    with _opened(uri, pre_buffer=False) as reader:
        absent = _check_columns(uri, reader.schema_arrow, columns, schema)
        for batch in reader.iter_batches(max_rows, columns=_stored(columns, absent)):
            yield _fill_in(batch, absent, columns, schema)


def offsets(rows: Sequence[Sized]) -> pa.Int32Array:
    """Start offset of each list, and the end of the last one."""
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


@contextmanager
def _opened(uri: str, *, pre_buffer: bool) -> Iterator[pq.ParquetFile]:
    try:
        with files.open_read(uri) as file, _complete(uri):
            reader = pq.ParquetFile(
                file, pre_buffer=pre_buffer, buffer_size=_READ_BYTES, page_checksum_verification=True
            )
            _check_version(uri, reader.schema_arrow)
            yield reader
    except FileNotFoundError:
        raise ValueError(f"{uri}: no such file") from None


@contextmanager
def _complete(uri: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        # Arrow raises a bare OSError for malformed bytes; one of the storage has an errno or a subclass
        if isinstance(error, OSError) and (type(error) is not OSError or error.errno is not None):
            raise
        reason = " ".join(str(error).split()).partition(". ")[0]
        raise ValueError(f"{uri}: not a complete Parquet file: {reason}") from None


def _check_columns(
    uri: str, found: pa.Schema, columns: list[str] | None, expected: pa.Schema | None
) -> list[pa.Field]:
    """The requested columns that the file's schema version did not have yet."""
    is_older = int(_version(found)) < SCHEMA_VERSION
    absent = [
        field
        for field in expected or ()
        if is_older and field.name not in found.names and (columns is None or field.name in columns)
    ]
    if unknown := set(columns or ()) - set(found.names) - {field.name for field in absent}:
        raise ValueError(f"{uri}: has no column {', '.join(sorted(unknown))}")
    for field in expected or ():
        if field.name not in found.names or (kind := found.field(field.name).type) == field.type:
            continue
        if not (is_older and _has_grown(kind, field.type)):
            raise ValueError(f"{uri}: column {field.name} is of type {kind}, expected {field.type}")
    return absent


def _has_grown(former: pa.DataType, present: pa.DataType) -> bool:
    """Whether both are lists of structs, and the present ones begin with the fields of the former."""
    if not all(pa.types.is_list(kind) and pa.types.is_struct(kind.value_type) for kind in (former, present)):
        return False
    before, now = list(former.value_type), list(present.value_type)
    return now[: len(before)] == before


def _stored(columns: list[str] | None, absent: Sequence[pa.Field]) -> list[str] | None:
    names = {field.name for field in absent}
    return None if columns is None else [name for name in columns if name not in names]


def _fill_in(
    rows: _Rows, absent: Sequence[pa.Field], columns: list[str] | None, schema: pa.Schema | None
) -> _Rows:
    if schema is None:
        return rows
    for at, field in enumerate(rows.schema):
        if field.name in schema.names and (wanted := schema.field(field.name)).type != field.type:
            rows = rows.set_column(at, wanted, rows[field.name].cast(wanted.type))
    if not absent:
        return rows
    for field in absent:
        rows = rows.append_column(field, pa.nulls(len(rows), field.type))
    known = [name for name in columns or schema.names if name in rows.schema.names]
    return rows.select(known + [name for name in rows.schema.names if name not in known])


def _version(schema: pa.Schema) -> str:
    return str((schema.metadata or {}).get(_VERSION_KEY, b"").decode())


def _check_version(uri: str, schema: pa.Schema) -> None:
    found = _version(schema)
    if not found.isdecimal():
        raise ValueError(f"{uri}: not written by SeamlessFlow: its metadata has no schema version")
    if int(found) > SCHEMA_VERSION:
        raise ValueError(
            f"{uri}: written by a newer SeamlessFlow: its schema version is {found}, this one reads up to "
            f"{SCHEMA_VERSION}; update this installation"
        )


def _concatenate(rows: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    if not rows:
        return np.empty(0, dtype)
    return np.concatenate(rows).astype(dtype, copy=False)
