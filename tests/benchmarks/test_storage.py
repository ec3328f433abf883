"""The storage benchmark compares formats with equal content, and measures each operation's memory alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import orjson

from benchmarks.storage import FORMATS, compare, peak_memory, sessions
from storage.tables.trajectories import read_trajectories


def test_every_format_holds_the_same_content(tmp_path: Path) -> None:
    rows = list(sessions(3))
    files = {name: kind.write(str(tmp_path), rows) for name, kind in FORMATS.items()}
    lines = [orjson.loads(line) for line in Path(files["jsonl"]).read_bytes().splitlines()]
    table = read_trajectories(files["parquet"]).to_pylist()
    for name in ("token_ids", "loss_mask", "turns", "messages", "reward", "session_id"):
        assert [row[name] for row in table] == [line[name] for line in lines]
    for row, line in zip(table, lines, strict=True):
        assert np.array_equal(
            np.array(row["logprobs"], np.float32), np.array(line["logprobs"], np.float32), equal_nan=True
        )
    assert FORMATS["jsonl_zstd"].rewards(files["jsonl_zstd"]) == [row.reward for row in rows]


def test_the_comparison_has_every_figure() -> None:
    result = compare(16)
    for figure in ("bytes_per_token", "rows_per_s_written", "rows_per_s_read", "rewards_ms"):
        assert set(result[figure]) == set(FORMATS)
        assert all(value > 0 for value in result[figure].values())
    assert 0 < result["bytes_ratio"] < 0.35
    assert result["read_speed_ratio"] > 0


def test_memory_is_that_of_a_process_of_its_own() -> None:
    ballast = bytearray(300 * 2**20)
    peak = peak_memory(16)
    assert set(peak) == {"write", "read"}
    assert all(0 < megabytes < 200 for megabytes in peak.values())
    del ballast
