import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import polars as pl
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage import files
from storage.media import ImageSpan
from storage.run_directory import RunDirectory
from storage.tables.schema import MULTIMODAL_SCHEMA, NOT_SAMPLED, SCHEMA, Trajectory, TurnSpan
from storage.tables.trajectories import (
    first_rows,
    iter_trajectories,
    read_trajectories,
    to_rows,
    to_table,
    write_trajectories,
)
from tests.bench.properties import examples

TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
FLOATS = st.floats(-1e6, 1e6, width=32)
INTS = st.integers(0, 2**31 - 1)
TIMES = st.integers(0, 4 * 10**15).map(lambda microseconds: microseconds / 1e6)


@st.composite
def turns(draw: st.DrawFn, length: int) -> list[TurnSpan]:
    borders = sorted(draw(st.lists(st.integers(0, length), max_size=4)))
    return [
        TurnSpan(
            "assistant", start, end, "stop", draw(TEXT), *(draw(FLOATS), draw(FLOATS), draw(INTS), reward)
        )
        if (reward := draw(st.none() | FLOATS)) or draw(st.booleans())
        else TurnSpan(draw(TEXT), start, end)
        for start, end in pairwise(borders)
    ]


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    length = draw(st.integers(0, 12))

    def array(elements: st.SearchStrategy[Any], dtype: type) -> np.ndarray:
        return np.array(draw(st.lists(elements, min_size=length, max_size=length)), dtype)

    versions = array(st.integers(NOT_SAMPLED, 5), np.int32)
    sampled = versions != NOT_SAMPLED
    return Trajectory(
        policy=draw(TEXT),
        task_id=draw(TEXT),
        environment=draw(TEXT),
        group_id=draw(st.none() | TEXT),
        session_id=draw(TEXT),
        branch_id=draw(TEXT),
        parent_branch_id=draw(st.none() | TEXT),
        shared_prefix=draw(st.integers(0, length)),
        token_ids=array(INTS, np.int32),
        loss_mask=array(st.booleans(), np.bool_) & sampled,
        logprobs=np.where(sampled, array(FLOATS, np.float32), np.float32("nan")).astype(np.float32),
        policy_versions=versions,
        turns=draw(turns(length)),
        messages=draw(TEXT),
        reward=draw(st.none() | FLOATS),
        reward_parts=draw(st.dictionaries(TEXT, FLOATS, max_size=3)),
        status="finished",
        interruptions=draw(INTS),
        started_at=draw(TIMES),
        finished_at=draw(TIMES),
        images=draw(st.lists(st.builds(ImageSpan, TEXT, INTS, INTS, INTS, INTS), max_size=2).map(tuple)),
    )


def example(session: int = 0, **changes: Any) -> Trajectory:
    """prompt, four sampled tokens of versions 1 and 2, tool result, two more sampled tokens."""
    versions = np.array([-1, -1, 1, 1, 2, 2, -1, 2, 2], np.int32)
    row = Trajectory(
        policy="policy",
        task_id=f"calculator-{session // 2}",
        environment="calculator",
        group_id=f"g{session // 2}",
        session_id=f"run-1.g{session // 2}.{session % 2}.a1",
        branch_id="0",
        parent_branch_id=None,
        shared_prefix=0,
        token_ids=np.arange(9, dtype=np.int32) + session,
        loss_mask=versions >= 0,
        logprobs=np.where(versions >= 0, -0.5, np.nan).astype(np.float32),
        policy_versions=versions,
        turns=[
            TurnSpan("user", 0, 2),
            TurnSpan("assistant", 2, 6, "stop", "e0", 1.0, 1.0, 0),
            TurnSpan("tool", 6, 7),
            TurnSpan("assistant", 7, 9, "stop", "e1", 1.0, 1.0, 0),
        ],
        messages='[{"role": "user", "content": "what is 2*3?"}]',
        reward=float(session % 2),
        reward_parts={"answer": float(session % 2)},
        status="finished",
        interruptions=1,
        started_at=1.7e9,
        finished_at=1.7e9 + 2.5,
    )
    return replace(row, **changes)


def same(left: Trajectory, right: Trajectory) -> bool:
    return all(
        np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
        if isinstance(a := getattr(left, field.name), np.ndarray)
        else a == getattr(right, field.name)
        for field in fields(Trajectory)
        for b in [getattr(right, field.name)]
    )


@settings(
    max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(rows=st.lists(trajectories(), max_size=4))
def test_rows_come_back_as_they_were_written(run_anywhere: RunDirectory, rows: list[Trajectory]) -> None:
    ref = write_trajectories(run_anywhere, 3, rows, "shard-0-attempt-1", is_multimodal=True)
    table = read_trajectories(run_anywhere.path(ref.uri))
    assert table["iteration"].to_pylist() == [3] * len(rows)
    assert table["run_id"].to_pylist() == ["run-1"] * len(rows)
    assert all(same(*pair) for pair in zip(rows, to_rows(table), strict=True))


def test_writing_the_same_part_again_gives_the_same_file(run_anywhere: RunDirectory) -> None:
    rows = [example(session) for session in range(3)]
    first = write_trajectories(run_anywhere, 0, rows, "shard-0-attempt-1")
    assert write_trajectories(run_anywhere, 0, rows, "shard-0-attempt-1") == first
    assert first.uri == "trajectories/iteration=0/shard-0-attempt-1.parquet"


def test_held_out_rows_are_kept_apart(run_anywhere: RunDirectory) -> None:
    ref = write_trajectories(run_anywhere, 4, [example(group_id=None)], "part", kind="evaluations")
    assert ref.uri == "evaluations/iteration=4/part.parquet"
    assert read_trajectories(run_anywhere.path(ref.uri))["group_id"].to_pylist() == [None]


def test_only_tokens_that_were_not_sampled_are_null(run_anywhere: RunDirectory) -> None:
    carried = example(loss_mask=np.zeros(9, np.bool_))
    (row,) = to_table("run-1", [carried]).to_pylist()
    assert row["policy_versions"] == [None, None, 1, 1, 2, 2, None, 2, 2]
    assert row["logprobs"] == [None, None, -0.5, -0.5, -0.5, -0.5, None, -0.5, -0.5]
    assert (row["min_version"], row["max_version"]) == (1, 2)


def test_a_row_without_sampled_tokens_has_no_version_range() -> None:
    (row,) = to_table("run-1", [example(policy_versions=np.full(9, NOT_SAMPLED, np.int32))]).to_pylist()
    assert (row["min_version"], row["max_version"]) == (None, None)


def test_arrays_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match=r"branch 0 of session .* must have equal lengths, got \[8, 9\]"):
        to_table("run-1", [example(token_ids=np.arange(8, dtype=np.int32))])


def test_a_slice_of_a_table_gives_its_own_rows() -> None:
    rows = [example(session) for session in range(4)]
    assert all(same(*pair) for pair in zip(rows[1:3], to_rows(to_table("r", rows).slice(1, 2)), strict=True))


def test_chosen_columns_are_read_alone(run_anywhere: RunDirectory) -> None:
    uri = run_anywhere.path(write_trajectories(run_anywhere, 2, [example()], "part").uri)
    assert read_trajectories(uri, ["reward"]).column_names == ["reward"]
    assert read_trajectories(uri, ["iteration"]).to_pylist() == [{"iteration": 2}]


@pytest.mark.parametrize("keep", [0, 3, 100, -1])
def test_a_truncated_file_is_named(run_anywhere: RunDirectory, keep: int) -> None:
    uri = run_anywhere.path(write_trajectories(run_anywhere, 0, [example()], "part").uri)
    files.write_atomic(uri, files.read_bytes(uri)[:keep])
    with pytest.raises(ValueError, match=r"part\.parquet: not a complete Parquet file"):
        read_trajectories(uri)


def test_a_byte_that_changed_on_the_way_is_found(run_anywhere: RunDirectory) -> None:
    uri = run_anywhere.path(write_trajectories(run_anywhere, 0, [example()], "part").uri)
    with files.local_copy(uri) as path:
        page = pq.read_metadata(path).row_group(0).column(0)
        end = page.dictionary_page_offset + page.total_compressed_size
    data = bytearray(files.read_bytes(uri))
    data[end - 1] ^= 1
    files.write_atomic(uri, bytes(data))
    with pytest.raises(ValueError, match=r"part\.parquet: not a complete Parquet file: .*CRC"):
        read_trajectories(uri)


def test_missing_files_and_other_folders_are_named(run_anywhere: RunDirectory) -> None:
    with pytest.raises(ValueError, match="no such file"):
        read_trajectories(run_anywhere.path("trajectories/iteration=0/none.parquet"))
    with pytest.raises(ValueError, match="expected a file in a folder iteration=K"):
        read_trajectories(run_anywhere.path("trajectories/none.parquet"))


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        ({"seamlessflow.schema": "3"}, "schema version 3, but this SeamlessFlow reads 4 and 5; use"),
        ({"seamlessflow.schema": "6"}, "schema version 6, but this SeamlessFlow reads 4 and 5; use"),
        ({"seamlessflow.schema": "x"}, "has no schema version"),
        ({}, "not a file of SeamlessFlow: the metadata has no schema version"),
    ],
)
def test_a_file_of_another_or_of_no_schema_version_is_refused(
    tmp_path: Path, metadata: dict[str, str], sentence: str
) -> None:
    folder = tmp_path / "iteration=0"
    folder.mkdir()
    table = to_table("r", [example()]).replace_schema_metadata(metadata)
    pq.write_table(table, folder / "part.parquet")
    with pytest.raises(ValueError, match=sentence):
        read_trajectories(str(folder / "part.parquet"))


def test_a_column_that_is_not_there_is_named(run_anywhere: RunDirectory) -> None:
    uri = run_anywhere.path(write_trajectories(run_anywhere, 0, [example()], "part").uri)
    with pytest.raises(ValueError, match=r"part\.parquet: the file has no column prize"):
        read_trajectories(uri, ["reward", "prize"])


def test_only_files_of_multimodal_policies_have_images(run_anywhere: RunDirectory) -> None:
    shown = example(images=[ImageSpan("a" * 64, 2, 4, 28, 56)])
    blind = run_anywhere.path(write_trajectories(run_anywhere, 0, [example()], "blind").uri)
    seeing = run_anywhere.path(
        write_trajectories(run_anywhere, 0, [shown, example(1)], "sees", is_multimodal=True).uri
    )
    for columns in (None, ["reward", "images"]):
        assert "images" not in read_trajectories(blind, columns).column_names
        assert [len(row) for row in read_trajectories(seeing, columns)["images"].to_pylist()] == [1, 0]
    names = [[piece.schema.names for piece in iter_trajectories(uri, 8)] for uri in (blind, seeing)]
    assert names == [[SCHEMA.names], [MULTIMODAL_SCHEMA.names]]
    assert [row.images for row in to_rows(read_trajectories(blind))] == [()]
    with pytest.raises(
        ValueError, match=r"branch 0 of session .* has images, but its policy does not see images"
    ):
        to_table("run-1", [shown])


def test_rows_of_an_iterator_are_written_in_groups_and_read_back_in_order(
    run_anywhere: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.tables.parquet.ROW_GROUP_BYTES", 100)
    uri = run_anywhere.path(write_trajectories(run_anywhere, 0, (example(i) for i in range(10)), "part").uri)
    with files.local_copy(uri) as path:
        assert pq.read_metadata(path).num_row_groups > 1
    assert [row.session_id for row in to_rows(read_trajectories(uri))] == [
        example(i).session_id for i in range(10)
    ]


def test_an_iteration_without_rows_is_an_empty_table(run_anywhere: RunDirectory) -> None:
    table = read_trajectories(run_anywhere.path(write_trajectories(run_anywhere, 0, [], "part").uri))
    assert (len(table), table.column_names[0]) == (0, "run_id")


def test_files_are_compressed_and_carry_statistics(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path / "r"))
    metadata = pq.read_metadata(run.path(write_trajectories(run, 0, [example()], "part").uri))
    columns = map(metadata.row_group(0).column, range(metadata.num_columns))
    [chunk] = [column for column in columns if column.path_in_schema == "reward"]
    assert (chunk.compression, chunk.statistics.max) == ("ZSTD", 0.0)


EXPECTED = pa.schema([pa.field("iteration", pa.int32()), *SCHEMA])


def with_pyarrow(folder: str) -> pa.Table:
    return pyarrow.dataset.dataset(folder, partitioning="hive").to_table()


def with_pandas(folder: str) -> pa.Table:
    frame = pd.read_parquet(folder)
    return pa.Table.from_pandas(frame[EXPECTED.names], schema=EXPECTED, preserve_index=False)


def with_polars(folder: str) -> pa.Table:
    return pl.read_parquet(folder).to_arrow()


def with_duckdb(folder: str) -> pa.Table:
    return duckdb.read_parquet(f"{folder}/**/*.parquet", hive_partitioning=True).to_arrow_table()


@pytest.mark.parametrize("read", [with_pyarrow, with_pandas, with_polars, with_duckdb])
def test_every_reader_gives_the_same_columns_once(tmp_path: Path, read: Callable[[str], pa.Table]) -> None:
    run = RunDirectory(str(tmp_path / "run-1"))
    rows = {0: [example(0), example(1)], 1: [example(2, reward=None, group_id=None)]}
    refs = [write_trajectories(run, iteration, part, "part") for iteration, part in rows.items()]
    table = read(run.path("trajectories"))
    assert sorted(table.column_names) == sorted(EXPECTED.names)
    expected = pa.concat_tables(read_trajectories(run.path(ref.uri)) for ref in refs)
    found = table.select(EXPECTED.names).cast(EXPECTED).sort_by("session_id")
    assert found.to_pylist() == expected.select(EXPECTED.names).to_pylist()


def test_a_run_directory_can_be_moved(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path / "a" / "run-1"))
    ref = write_trajectories(run, 0, [example()], "part")
    shutil.move(tmp_path / "a", tmp_path / "b")
    moved = RunDirectory(str(tmp_path / "b" / "run-1"))
    assert len(read_trajectories(moved.path(ref.uri))) == 1


def test_the_first_row_of_every_session_is_found_in_order_and_across_chunks() -> None:
    sessions = pa.chunked_array([["s9", "s9", "s1"], ["s1", "s9", "s4"]])
    assert first_rows(sessions).tolist() == [0, 2, 5]
