"""Files of every schema version ever written, in tests/data, are read as they were meant."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.batches import BATCH_SCHEMA, read_batch
from storage.metrics import read_metrics
from storage.parquet import SCHEMA_VERSION
from storage.run_directory import RunDirectory
from storage.schema import SCHEMA
from storage.trajectories import iter_trajectories, read_trajectories, to_rows
from tests.storage.golden import DATA, ITERATION, plain, write

VERSIONS = range(1, SCHEMA_VERSION + 1)


def expected(version: int) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((DATA / f"v{version}" / "expected.json").read_text())
    return content


def part(version: int, kind: str) -> str:
    return RunDirectory(str(DATA / f"v{version}")).partition(kind, ITERATION) + "/part.parquet"


def shared(rows: list[dict[str, Any]], found: pa.Table) -> list[dict[str, Any]]:
    """Rows of a table, in the columns and with the fields of turns that their version had."""
    found_rows: list[dict[str, Any]] = plain(found.select(list(rows[0])))
    fields = rows[0]["turns"][0].keys()
    for row in found_rows:
        row["turns"] = [{name: turn[name] for name in fields} for turn in row["turns"]]
    return found_rows


@pytest.mark.parametrize("version", VERSIONS)
def test_files_of_every_version_are_read(version: int) -> None:
    rows = expected(version)
    sampled = read_trajectories(part(version, "trajectories"))
    assert shared(rows["trajectories"], sampled) == rows["trajectories"]
    batch = read_batch(part(version, "batches"))
    assert shared(rows["batches"], batch) == rows["batches"]
    run = RunDirectory(str(DATA / f"v{version}"))
    assert read_metrics(run.metrics_file("train", ITERATION)) == rows["metrics"]


@pytest.mark.parametrize("version", VERSIONS)
def test_rows_and_pieces_of_every_version_have_the_columns_of_today(version: int) -> None:
    uri = part(version, "trajectories")
    sessions = [row.session_id for row in to_rows(read_trajectories(uri))]
    assert sessions == [row["session_id"] for row in expected(version)["trajectories"]]
    assert {batch.schema for batch in iter_trajectories(uri, 2)} == {SCHEMA}


@pytest.mark.parametrize(("kind", "schema"), [("trajectories", SCHEMA), ("batches", BATCH_SCHEMA)])
def test_a_schema_that_changes_gets_a_new_version(kind: str, schema: pa.Schema, tmp_path: Path) -> None:
    write(tmp_path / f"v{SCHEMA_VERSION}")
    kept, today = (
        pq.read_schema(folder / f"v{SCHEMA_VERSION}" / kind / f"iteration={ITERATION}" / "part.parquet")
        for folder in (DATA, tmp_path)
    )
    assert kept.equals(today), "raise SCHEMA_VERSION, read the old one too, run tests.storage.golden"
    assert kept.names == schema.names
