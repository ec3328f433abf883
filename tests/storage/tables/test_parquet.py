"""How Parquet files are opened; what is in them is in the tests of trajectories, batches and outcomes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from fsspec.implementations.local import LocalFileSystem

from storage.tables import parquet


def test_a_local_file_is_read_without_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of Arrow that waits for Python at the end of the process would abort it."""
    uri = str(tmp_path / "table.parquet")
    table = pa.table({"number": range(1000)})
    parquet.write_table(uri, table)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("Python has opened the file")

    monkeypatch.setattr(LocalFileSystem, "open", refuse)
    assert parquet.read_table(uri)["number"].equals(table["number"])
    assert sum(len(batch) for batch in parquet.iter_batches(uri, 300)) == 1000
