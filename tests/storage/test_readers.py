"""Readers that are not ours open every table, also beside what a killed writer left."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd  # type: ignore[import-untyped]
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from datasets import load_dataset

from storage import files
from storage.run_directory import RunDirectory
from storage.tables import parquet
from storage.tables.batches import read_batch
from storage.tables.judgements import Judgement, write_judgements
from storage.tables.metrics import write_metrics
from storage.tables.parquet import READ_VERSIONS, SCHEMA_VERSION
from storage.unfinished import list_unfinished
from tests import bench
from tests.bench import tables
from tests.bench.commands import sf

Read = Callable[[str], list[dict[str, Any]]]
"""Rows of a folder."""

NO_SPARK = "pyspark is not installed (400 MB): pip install pyspark; it also needs Java 17"

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "readers.md"
CODE = dict(
    re.findall(
        r"^### (.+?)\n.*?```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
)
"""Code of the page by its heading."""


@pytest.fixture(scope="module")
def every_table(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    run = RunDirectory(str(tmp_path_factory.mktemp("tables") / "run-1"))
    tables.write_tables(run)
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
    """Spark, and its way to Arrow. It is too large for the requirements of the tests."""
    sql = pytest.importorskip("pyspark.sql", reason=NO_SPARK)
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


@pytest.mark.parametrize("table", tables.TABLES)
def test_every_reader_opens_every_table(every_table: RunDirectory, read: Read, table: str) -> None:
    rows = read(every_table.path(table))
    assert len(rows) == tables.NUM_ROWS
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
import os
import sys
import pyarrow as pa
from storage.run_directory import RunDirectory
from storage.tables import parquet
from storage.tables.batches import BATCH_SCHEMA
from tests.bench.tables import TABLES

run = RunDirectory(sys.argv[1])

def pieces(others):
    # more than is buffered: readers skip empty files
    yield pa.Table.from_pylist([{"messages": os.urandom(2**16).hex()}], schema=BATCH_SCHEMA)
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
    tables.write_tables(run)
    command = [sys.executable, "-c", WRITER, run.uri]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == b"writing\n"
        bench.ages.age(run.uri)
        assert list_unfinished(run.uri) == [], "the writer is alive"
        assert all(file.stat().st_size > 2**14 for file in Path(run.uri).rglob("*.tmp"))
        writer.kill()
    assert writer.returncode == -signal.SIGKILL and len(list_unfinished(run.uri)) == len(tables.TABLES)
    return run


@pytest.mark.parametrize("table", tables.TABLES)
def test_every_reader_opens_a_table_whose_writer_was_killed(
    killed_writer: RunDirectory, read: Read, table: str
) -> None:
    assert len(read(killed_writer.path(table))) == tables.NUM_ROWS


@pytest.fixture(scope="module")
def mixed_run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run that has files of each schema version."""
    run = RunDirectory(str(tmp_path_factory.mktemp("mixed") / "run-1"))
    bench.runs.configure(run)
    for version in READ_VERSIONS:
        for kind in ("trajectories", "batches"):
            source = RunDirectory(str(bench.golden.DATA / f"v{version}")).partition(
                kind, bench.golden.ITERATION
            )
            shutil.copytree(source, run.partition(kind, version))
    asked = [("s", Judgement(judge="fair", verdict="1", discarded=["length"]))]
    for iteration, folder in enumerate(("judgements", "judgements/evaluations")):
        ref = write_judgements(run, iteration, asked, "1")
        # as earlier versions wrote them
        earlier = pq.ParquetFile(run.path(ref.uri)).read().drop_columns(["discarded"])
        files.remove_folder(run.partition("judgements", iteration))
        parquet.write_table(f"{run.partition(folder, iteration)}/1.parquet", earlier)
    write_judgements(run, 2, asked, "1")
    write_judgements(run, 2, asked, "1", "evaluations")
    return run


def test_our_reader_opens_a_folder_of_several_schema_versions(mixed_run: RunDirectory) -> None:
    uris = [uri for uris in mixed_run.list_partitions("batches").values() for uri in uris]
    found = pa.concat_tables(map(read_batch, uris)).sort_by("iteration")
    of_each = [found.filter(pc.equal(found["iteration"], version)) for version in READ_VERSIONS]
    plain = [rows.drop_columns(["run_id", "iteration"]).to_pylist() for rows in of_each]
    assert plain[0] == plain[1] and len(plain[0]) == 3


@pytest.mark.parametrize("kind", ["trajectories", "batches"])
def test_every_reader_opens_what_is_copied_of_several_schema_versions(
    mixed_run: RunDirectory, tmp_path: Path, read: Read, kind: str
) -> None:
    code, said = sf("export", mixed_run.uri, "--to", "parquet", str(tmp_path / "tables"))
    assert (code, said) == (0, f"{tmp_path / 'tables'}: 16 rows of schema version {SCHEMA_VERSION}")
    rows = read(str(tmp_path / "tables" / kind))
    assert sorted(len(row["reward_parts"]) for row in rows) == [0, 0, 2, 2, 2, 2]
    code, said = sf("export", mixed_run.uri, "--to", "parquet", str(tmp_path / "tables"))
    assert code == 2 and "tables is not empty; choose another folder or remove it" in said


@pytest.mark.parametrize("kind", ["judgements", "evaluation_judgements"])
def test_every_reader_opens_judgements_that_are_copied(
    mixed_run: RunDirectory, tmp_path: Path, read: Read, kind: str
) -> None:
    assert sf("export", mixed_run.uri, "--to", "parquet", str(tmp_path / "tables"))[0] == 0
    rows = read(str(tmp_path / "tables" / kind))
    assert sorted(list(row["discarded"]) for row in rows) == [[], ["length"]]


def test_a_folder_of_several_schema_versions_opens_without_the_column(mixed_run: RunDirectory) -> None:
    folder = mixed_run.path("trajectories")
    columns = ["session_id", "reward", "turns"]
    chosen = duckdb.read_parquet(f"{folder}/**/*.parquet").select(", ".join(columns)).to_arrow_table()
    of_each = pd.read_parquet(folder, columns=columns), pl.read_parquet(folder, columns=columns), chosen
    assert [len(rows) for rows in of_each] == [6, 6, 6]


@pytest.mark.parametrize("heading", CODE)
def test_the_code_of_the_page_runs(
    tmp_path: Path, heading: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "Spark" in heading:
        pytest.importorskip("pyspark.sql", reason=NO_SPARK)
    run = RunDirectory(str(tmp_path / "runs" / "quickstart"))
    tables.write_tables(run)
    for iteration in (2, 10):
        write_metrics(run, "train", iteration, [{"loss": 1.0, f"of_{iteration}": 2.0}])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    # Java keeps the folder in which it was started
    exec(compile(CODE[heading].replace("runs/quickstart", run.uri), heading, "exec"), {})
    shown = capsys.readouterr().out
    assert (
        ("of_2" in shown and "of_10" in shown)
        if "All metrics" in heading
        else "failed" in shown or "train" in shown
    )
