"""Writes the golden files of the schema version that the code writes today: tests/data/v<version>.

python -m tests.bench.golden, once per schema version, when it is new; never again after.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from storage.run_directory import RunDirectory
from storage.tables.batches import read_batch, write_batch
from storage.tables.metrics import read_metrics, write_metrics
from storage.tables.parquet import SCHEMA_VERSION
from storage.tables.schema import Trajectory, TurnSpan
from storage.tables.trajectories import read_trajectories, write_trajectories

DATA = Path(__file__).parents[1] / "data"
ITERATION = 3


def write(folder: Path) -> None:
    run = RunDirectory(str(folder))
    sampled = run.path(write_trajectories(run, ITERATION, _rows(), "part").uri)
    table = read_trajectories(sampled)
    batch = write_batch(
        run,
        ITERATION,
        table,
        advantages=[np.where(row.loss_mask, 0.5, 0.0).astype(np.float32) for row in _rows()],
        weights=[np.where(row.loss_mask, 0.25, 1.0).astype(np.float32) for row in _rows()],
        decisions=["train", "train", "failed"],
        part="part",
    )
    metrics = write_metrics(run, "train", ITERATION, [{"loss": 0.25, "entropy": 1.5}, {"loss": 0.125}])
    expected = {
        "trajectories": plain(table),
        "batches": plain(read_batch(run.path(batch.uri))),
        "metrics": read_metrics(run.path(metrics.uri)),
    }
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")


def plain(table: pa.Table) -> Any:
    """Rows after a round trip through JSON."""
    return json.loads(json.dumps(table.to_pylist(), default=str))


def _rows() -> list[Trajectory]:
    user = TurnSpan("user", 0, 2)
    answer = TurnSpan("assistant", 2, 4, "stop", "e-r0", 1.0, 0.5, 7, 0.25)
    return [
        _row("s0", "0", None, 0, [user, answer], 1.0),
        _row("s0", "1", "0", 2, [user, answer], 1.0),
        _row("s1", "0", None, 0, [user], None),
    ]


def _row(
    session: str, branch: str, parent: str | None, shared: int, turns: list[TurnSpan], reward: float | None
) -> Trajectory:
    length = turns[-1].end
    sampled = np.arange(length) >= 2
    return Trajectory(
        policy="policy",
        task_id="calculator/17",
        environment="calculator",
        group_id="g-00004",
        session_id=session,
        branch_id=branch,
        parent_branch_id=parent,
        shared_prefix=shared,
        token_ids=np.array([101, 7, 8, 2**31 - 1], np.int32)[:length],
        loss_mask=sampled,
        logprobs=np.where(sampled, np.float32(-0.75), np.float32("nan")),
        policy_versions=np.where(sampled, ITERATION - 1, -1).astype(np.int32),
        turns=turns,
        messages=json.dumps([{"role": "user", "content": "2 + 2 = ? \N{GREEK SMALL LETTER PI}"}]),
        reward=reward,
        reward_parts={} if reward is None else {"answer": 0.75, "format": 0.25},
        status="failed" if reward is None else "finished",
        interruptions=1,
        started_at=1.7e9,
        finished_at=1.7e9 + 1.25,
        output="4\nthought for 1 s \N{GREEK SMALL LETTER PI}" if branch == "0" and session == "s0" else None,
        tools=None if session == "s1" else json.dumps([{"type": "function", "function": {"name": "calc"}}]),
    )


if __name__ == "__main__":
    write(DATA / f"v{SCHEMA_VERSION}")
