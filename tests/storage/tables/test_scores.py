"""What a teacher at a URL said, stored beside a batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from storage import files
from storage.run_directory import RunDirectory
from storage.tables.parquet import numpy_rows
from storage.tables.scores import read_scores, write_scores

ROWS = pa.table({"session_id": ["s0", "s0", "s1"], "branch_id": ["b0", "b1", "b0"]})
SAID = [np.array(values, np.float32) for values in ([0, -0.5], [0, 0, -2], [])]


def test_scores_come_back_for_the_rows_of_their_batch(run_anywhere: RunDirectory) -> None:
    ref = write_scores(run_anywhere, 3, ROWS, SAID, "scores-1")
    assert ref.uri == "scores/iteration=3/scores-1.parquet"
    column = read_scores(run_anywhere.path(ref.uri), ROWS)
    assert [row.tolist() for row in numpy_rows(column)] == [row.tolist() for row in SAID]
    assert write_scores(run_anywhere, 3, ROWS, SAID, "scores-1") == ref


@pytest.mark.parametrize("order", [[1, 0, 2], [0, 1], [0, 1, 1]])
def test_scores_of_other_rows_are_refused(run_anywhere: RunDirectory, order: list[int]) -> None:
    ref = write_scores(run_anywhere, 3, ROWS, SAID, "scores-1")
    with pytest.raises(ValueError, match=r"scores-1.parquet: expected one row for each row of its batch, in"):
        read_scores(run_anywhere.path(ref.uri), ROWS.take(pa.array(order)))


def test_a_broken_file_is_named(empty_run: RunDirectory) -> None:
    ref = write_scores(empty_run, 3, ROWS, SAID, "scores-1")
    Path(empty_run.path(ref.uri)).write_bytes(b"broken")
    with pytest.raises(ValueError, match=r"scores-1.parquet: "):
        read_scores(empty_run.path(ref.uri), ROWS)


def test_a_run_made_anew_has_no_scores(run_anywhere: RunDirectory) -> None:
    write_scores(run_anywhere, 0, ROWS, SAID, "scores-1")
    run_anywhere.begin_anew()
    assert files.list_files(run_anywhere.partition("scores", 0)) == []
