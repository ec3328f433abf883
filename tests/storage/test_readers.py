"""Readers that are not ours open every table, also beside what a killed writer left."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd  # type: ignore[import-untyped]
import polars as pl
import pyarrow.parquet as pq
import pytest
from datasets import load_dataset

from storage.run_directory import RunDirectory
from storage.unfinished import list_unfinished
from tests.bench.tables import NUM_ROWS, TABLES, write_tables

Read = Callable[[str], list[dict[str, Any]]]
"""Rows of a folder."""


@pytest.fixture(scope="module")
def every_table(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    run = RunDirectory(str(tmp_path_factory.mktemp("tables") / "run-1"))
    write_tables(run)
    return run


@pytest.fixture(scope="module")
def with_datasets(tmp_path_factory: pytest.TempPathFactory) -> Read:
    def read(folder: str) -> list[dict[str, Any]]:
        cache = str(tmp_path_factory.mktemp("cache"))
        files = f"{folder}/**/*.parquet"
        return list(load_dataset("parquet", data_files=files, split="train", cache_dir=cache))

    return read


def with_pandas(folder: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pd.read_parquet(folder).to_dict("records")
    return rows


def with_polars(folder: str) -> list[dict[str, Any]]:
    return pl.read_parquet(folder).to_dicts()


def with_duckdb(folder: str) -> list[dict[str, Any]]:
    found = duckdb.read_parquet(f"{folder}/**/*.parquet", hive_partitioning=True)
    rows: list[dict[str, Any]] = found.to_arrow_table().to_pylist()
    return rows


@pytest.fixture(scope="module")
def with_spark() -> Iterator[Read]:
    """Spark, and its way to Arrow. It is too large for the requirements of the tests: pip install pyspark."""
    sql = pytest.importorskip("pyspark.sql", reason="pyspark (400 MB) is not installed; it also needs Java 17")
    local = sql.SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
    session = local.config("spark.driver.bindAddress", "127.0.0.1").getOrCreate()
    try:
        yield lambda folder: session.read.parquet(folder).toArrow().to_pylist()
    finally:
        session.stop()


@pytest.fixture(scope="module", params=["datasets", "duckdb", "polars", "pandas", "spark"])
def read(request: pytest.FixtureRequest) -> Read:
    """A reader by the name of its library."""
    functions: dict[str, Read] = {"duckdb": with_duckdb, "polars": with_polars, "pandas": with_pandas}
    chosen: Read = functions.get(request.param) or request.getfixturevalue(f"with_{request.param}")
    return chosen


@pytest.mark.parametrize("table", TABLES)
def test_every_reader_opens_every_table(every_table: RunDirectory, read: Read, table: str) -> None:
    rows = read(every_table.path(table))
    assert len(rows) == NUM_ROWS
    files = sorted(Path(every_table.path(table)).rglob("*.parquet"))
    assert {*pq.read_schema(files[0]).names} <= {*rows[0]}
    if "reward_parts" in rows[0]:
        parts = sorted(len(row["reward_parts"]) for row in rows)
        assert parts == [0, 0, 2, 2]
        [first, *_] = (row["reward_parts"] for row in rows if len(row["reward_parts"]))
        assert [dict(part) for part in first] == [
            {"name": "answer", "value": 0.25},
            {"name": "form", "value": 0.25},
        ]


WRITER = """
import sys
from storage.run_directory import RunDirectory
from storage.tables import parquet
from storage.tables.batches import BATCH_SCHEMA
from tests.bench.tables import TABLES

run = RunDirectory(sys.argv[1])

def pieces(others):
    yield BATCH_SCHEMA.empty_table()
    write(others)

def write(tables):
    if not tables:
        print("writing", flush=True)
        sys.stdin.read()
    folder, _, kind = tables[0].partition("/")
    uri = run.metrics_file(kind, 11) if kind else run.partition(folder, 10) + "/x.parquet"
    parquet.write_tables(uri, BATCH_SCHEMA, pieces(tables[1:]))

write(TABLES)
"""
"""Begins to write a file of each table, and waits."""


@pytest.fixture(scope="module")
def killed_writer(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Every table, with what is left of a writer that was killed."""
    run = RunDirectory(str(tmp_path_factory.mktemp("killed") / "run-1"))
    write_tables(run)
    command = [sys.executable, "-c", WRITER, run.uri]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == b"writing\n"
        assert list_unfinished(run.uri) == [], "the writer is alive"
        writer.kill()
    assert writer.returncode == -signal.SIGKILL and len(list_unfinished(run.uri)) == len(TABLES)
    return run


@pytest.mark.parametrize("table", TABLES)
def test_every_reader_opens_a_table_whose_writer_was_killed(
    killed_writer: RunDirectory, read: Read, table: str
) -> None:
    assert len(read(killed_writer.path(table))) == NUM_ROWS
