"""Reads and writes this project's Parquet files, and converts NumPy rows to Arrow list columns.

Owns compression, the schema version and the validation of a file. Knows nothing of what columns mean.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from storage import files
from storage.errors import storage_errors
from storage.files import FileRef
from storage.local import open_to_read

SCHEMA_VERSION = 5
"""Version of the files that are written."""
READ_VERSIONS = (4, SCHEMA_VERSION)
"""Versions of the files that are read; tests/data has files of each."""
_VERSION_KEY = b"seamlessflow.schema"
METADATA = {_VERSION_KEY: str(SCHEMA_VERSION).encode()}
ROW_GROUP_BYTES = 32 * 2**20
"""Approximate size of a row group before compression; a writer or reader holds one at a time."""
_READ_BYTES = 2**20

Rows = TypeVar("Rows", pa.Table, pa.RecordBatch)


def write_table(uri: str, table: pa.Table) -> FileRef:
    """Write a table in row groups; equal tables give equal bytes."""
    rows = max(1, len(table) * ROW_GROUP_BYTES // max(1, table.nbytes))
    return write_tables(uri, table.schema, (table.slice(at, rows) for at in range(0, len(table), rows)))


def write_tables(uri: str, schema: pa.Schema, tables: Iterable[pa.Table]) -> FileRef:
    """Write one row group per table as the tables arrive, so that never all of them are in memory."""
    # not every reader of the folder would skip what a killed writer leaves in it; a run may lie in a folder
    # that has the name of a partition too
    table, partition, rest = uri.rpartition("/iteration=")
    with files.writer(uri, above=table if partition and rest.count("/") < 2 else None) as file:
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


def read_table(
    uri: str,
    columns: list[str] | None = None,
    schema: pa.Schema | None = None,
    optional: Collection[str] = (),
) -> pa.Table:
    """Read one file; with `columns`, only their bytes. Columns that are `optional` may be missing. Raises
    ValueError if the file is missing, broken, of another schema version, lacks a column, or has one of
    another type than in `schema`. Maps of schema version 4 become lists."""
    with _open(uri, pre_buffer=True) as reader:
        table = reader.read(_check_columns(uri, reader.schema_arrow, columns, schema, optional))
    return _with_lists(table, schema)


def iter_batches(
    uri: str,
    max_rows: int,
    columns: list[str] | None = None,
    schema: pa.Schema | None = None,
    optional: Collection[str] = (),
) -> Iterator[pa.RecordBatch]:
    """Read one file, `max_rows` at a time, never whole in memory; else like `read_table`."""
    with _open(uri, pre_buffer=False) as reader:
        readable = _check_columns(uri, reader.schema_arrow, columns, schema, optional)
        for batch in reader.iter_batches(max_rows, columns=readable):
            yield _with_lists(batch, schema)


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
def _open(uri: str, *, pre_buffer: bool) -> Iterator[pq.ParquetFile]:
    try:
        with _open_file(uri) as file, _complete(uri):
            reader = pq.ParquetFile(
                file, pre_buffer=pre_buffer, buffer_size=_READ_BYTES, page_checksum_verification=True
            )
            _check_version(uri, reader.schema_arrow)
            yield reader
    except FileNotFoundError:
        raise ValueError(f"{uri}: no such file") from None


@contextmanager
def _open_file(uri: str) -> Iterator[Any]:
    """The file as Arrow is to read it: a local one without Python. A thread of Arrow that waits for Python's
    lock while the interpreter ends would abort the process (apache/arrow#34314)."""
    if files.is_local(uri):
        path = files.absolute(uri)
        with storage_errors(uri):
            open_to_read(path).close()
            with pa.OSFile(path) as file:
                yield file
    else:
        with files.open_read(uri) as file:
            yield file


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
    uri: str,
    stored: pa.Schema,
    columns: list[str] | None,
    expected: pa.Schema | None,
    optional: Collection[str],
) -> list[str] | None:
    """The columns that are there."""
    if unknown := set(columns or ()) - set(stored.names) - set(optional):
        raise ValueError(f"{uri}: the file has no column {', '.join(sorted(unknown))}")
    for field in expected or ():
        kind = stored.field(field.name).type if field.name in stored.names else field.type
        if kind != field.type and not _was_map(kind, field.type):
            raise ValueError(f"{uri}: column {field.name} is of type {kind}, expected {field.type}")
    return None if columns is None else [name for name in columns if name in stored.names]


def _was_map(kind: pa.DataType, expected: pa.DataType) -> bool:
    """Whether schema version 4 has a map where later files have this list of named values."""
    if not pa.types.is_map(kind):
        return False
    return expected == pa.list_(pa.struct([("name", kind.key_type), ("value", kind.item_type)]))


def _with_lists(rows: Rows, schema: pa.Schema | None) -> Rows:
    for number, field in enumerate(rows.schema):
        if schema is not None and pa.types.is_map(field.type):
            kind = schema.field(field.name).type
            rows = rows.set_column(number, pa.field(field.name, kind), rows.column(number).cast(kind))
    return rows


def _check_version(uri: str, schema: pa.Schema) -> None:
    version = str((schema.metadata or {}).get(_VERSION_KEY, b"").decode())
    if not version.isdecimal():
        raise ValueError(f"{uri}: not a file of SeamlessFlow: the metadata has no schema version")
    if int(version) not in READ_VERSIONS:
        readable = " and ".join(map(str, READ_VERSIONS))
        raise ValueError(
            f"{uri}: the file has schema version {version}, but this SeamlessFlow reads {readable}; use the "
            "version of SeamlessFlow that wrote the file"
        )


def _concatenate(rows: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    if not rows:
        return np.empty(0, dtype)
    return np.concatenate(rows).astype(dtype, copy=False)
