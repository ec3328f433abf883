"""Rows of groups that have ended: written, read back in order of iterations, and missed in one sentence."""

from __future__ import annotations

import re
from typing import Any

import pyarrow as pa
import pytest

from storage import files
from storage.errors import StorageError
from storage.files import FileRef
from storage.run_directory import RunDirectory
from storage.tables import parquet
from storage.tables.outcomes import SCHEMA, read_outcomes, write_outcomes
from tests.bench.runs import commit


def outcome(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "group_id": f"run-1.g{number}",
        "number": number,
        "source": "sums",
        "task_index": 7,
        "task_id": "sums-7",
        "position": 8,
        "need": 2,
        "size": 3,
        "version": 4,
        "verdict": "sealed",
        "rewards": [1.0, 0.1],
        "scores": [1.0, 0.0],
        "tokens": [5, 6],
        "statuses": ["finished", "timeout"],
        **changes,
    }


OUTSIDE: dict[str, Any] = {"task_index": None, "rewards": [], "scores": [], "tokens": [], "statuses": []}


def committed(run: RunDirectory, iteration: int, *rows: dict[str, Any]) -> FileRef:
    ref = write_outcomes(run, iteration, rows, "rollout-1")
    commit(run, iteration, "rollout", outputs=[ref])
    return ref


def test_rows_of_earlier_iterations_are_read_as_they_were_written(run_anywhere: RunDirectory) -> None:
    written = [[outcome(0)], [], [outcome(2, **OUTSIDE), outcome(1, source="")], [outcome(3)]]
    refs = [committed(run_anywhere, iteration, *rows) for iteration, rows in enumerate(written)]
    assert refs[2].uri == "outcomes/iteration=2/rollout-1.parquet"
    read = list(read_outcomes(run_anywhere, before=3))
    assert read == [{"run_id": "run-1", **row} for rows in written[:3] for row in rows]
    assert list(read_outcomes(run_anywhere, before=0)) == []


def test_rows_that_are_written_again_are_the_same_file(run_anywhere: RunDirectory) -> None:
    rows = [outcome(0), outcome(1)]
    assert write_outcomes(run_anywhere, 0, rows, "rollout-2") == write_outcomes(
        run_anywhere, 0, rows, "rollout-2"
    )


def test_only_files_that_a_manifest_names_are_read(run_anywhere: RunDirectory) -> None:
    write_outcomes(run_anywhere, 0, [outcome(0)], "rollout-1")
    assert list(read_outcomes(run_anywhere, before=1)) == []
    write_outcomes(run_anywhere, 1, [outcome(0)], "rollout-0")
    committed(run_anywhere, 1, outcome(1))
    assert [row["number"] for row in read_outcomes(run_anywhere, before=2)] == [1]
    assert len(files.list_files(run_anywhere.partition("outcomes", 1))) == 1, (
        "what no manifest names is removed"
    )


def test_a_run_made_anew_has_no_outcomes(run_anywhere: RunDirectory) -> None:
    committed(run_anywhere, 0, outcome(0))
    run_anywhere.begin_anew()
    assert files.list_files(run_anywhere.partition("outcomes", 0)) == []


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda uri: files.remove(uri), "no such file"),
        (lambda uri: files.write_atomic(uri, b"nothing"), "not a complete Parquet file: .*"),
        (
            lambda uri: parquet.write_table(uri, pa.table({"run_id": ["run-1"]})),
            f"the file has no column {', '.join(sorted(set(SCHEMA.names) - {'run_id'}))}",
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_named(run_anywhere: RunDirectory, damage: Any, fault: str) -> None:
    committed(run_anywhere, 0, outcome(0))
    uri = run_anywhere.path(committed(run_anywhere, 1, outcome(1)).uri)
    damage(uri)
    with pytest.raises(ValueError, match=f"^{re.escape(uri)}: {fault}$"):
        list(read_outcomes(run_anywhere, before=2))
    assert len(list(read_outcomes(run_anywhere, before=1))) == 1


def test_a_storage_that_fails_names_the_file(tmp_path: Any) -> None:
    run = RunDirectory(str(tmp_path / "run-1"))
    uri = run.path(committed(run, 1, outcome(1)).uri)
    files.remove(uri)
    (tmp_path / "run-1/outcomes/iteration=1/rollout-1.parquet").mkdir()
    with pytest.raises(StorageError, match=f"^{re.escape(uri)} is a folder, but must be a file"):
        list(read_outcomes(run, before=2))
