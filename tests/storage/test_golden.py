"""Files of each schema version that is read, in tests/data, are read as they were meant."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.run_directory import RunDirectory
from storage.tables.batches import BATCH_SCHEMA, read_batch
from storage.tables.metrics import read_metrics
from storage.tables.parquet import READ_VERSIONS, SCHEMA_VERSION
from storage.tables.schema import SCHEMA
from storage.tables.trajectories import iter_trajectories, read_trajectories, to_rows
from tests.bench import golden


@pytest.mark.parametrize("version", READ_VERSIONS)
def test_files_that_were_written_once_are_read_as_they_were_meant(version: int) -> None:
    kept = golden.DATA / f"v{version}"
    expected = json.loads((kept / "expected.json").read_text(encoding="utf-8"))

    def part(kind: str) -> str:
        return RunDirectory(str(kept)).partition(kind, golden.ITERATION) + "/part.parquet"

    sampled = read_trajectories(part("trajectories"))
    assert sampled.schema.field("reward_parts").type == SCHEMA.field("reward_parts").type
    assert golden.plain(sampled) == expected["trajectories"]
    assert [row.session_id for row in to_rows(sampled)] == [
        row["session_id"] for row in golden.plain(sampled)
    ]
    assert {piece.schema for piece in iter_trajectories(part("trajectories"), 2)} == {SCHEMA}
    assert golden.plain(read_batch(part("batches"))) == expected["batches"]
    metrics = read_metrics(RunDirectory(str(kept)).metrics_file("train", golden.ITERATION))
    assert metrics == expected["metrics"]


@pytest.mark.parametrize(("kind", "schema"), [("trajectories", SCHEMA), ("batches", BATCH_SCHEMA)])
def test_a_schema_that_changes_gets_a_new_version(kind: str, schema: pa.Schema, tmp_path: Path) -> None:
    golden.write(tmp_path / f"v{SCHEMA_VERSION}")
    kept, today = (
        pq.read_schema(
            folder / f"v{SCHEMA_VERSION}" / kind / f"iteration={golden.ITERATION}" / "part.parquet"
        )
        for folder in (golden.DATA, tmp_path)
    )
    assert kept.equals(today), "raise SCHEMA_VERSION, read the old one too, run tests.bench.golden"
    assert kept.names == schema.names
