"""A run directory with every table that a run writes, each in its place and with what makes a table hard to
read: columns without a value, lists that are missing or empty, rows that lack a metric."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from storage.run_directory import RunDirectory
from storage.tables.batches import write_batch
from storage.tables.judgements import Judgement, write_judgements
from storage.tables.metrics import KINDS, write_metrics
from storage.tables.outcomes import write_outcomes
from storage.tables.schema import Trajectory
from storage.tables.scores import write_scores
from storage.tables.trajectories import read_trajectories, write_trajectories
from tests.bench.runs import configure, conversation, group_row

TABLES = (
    *("trajectories", "batches", "evaluations", "opened", "outcomes", "scores"),
    *("judgements", "evaluation_judgements"),
    *(f"metrics/{kind}" for kind in KINDS),
)
"""Folders of the run directory that are tables."""

NUM_ROWS = 4
"""Rows of each table, two per iteration."""


def write_tables(run: RunDirectory) -> None:
    """Write every table for the iterations 2 and 10."""
    configure(run)
    for iteration in (2, 10):
        rows = _rows(iteration)
        ref = write_trajectories(run, iteration, rows, "rollout-1")
        write_trajectories(run, iteration, [_held_out(row) for row in rows], "evaluation-1", "evaluations")
        write_trajectories(run, iteration, [_held_out(row) for row in rows], "0-2", "opened")
        table = read_trajectories(run.path(ref.uri))
        # a critic's advantages are made by the train step
        given = None if iteration == 2 else [np.ones(len(row.token_ids), np.float32) for row in rows]
        write_batch(
            run,
            iteration,
            table,
            advantages=given,
            weights=given,
            decisions=["train", "failed"],
            part="batch-1",
        )
        write_scores(run, iteration, table, [np.zeros(len(row.token_ids), np.float32) for row in rows], "1")
        groups = [group_row(2 * iteration, [1, 0]), group_row(2 * iteration + 1, verdict="timeout")]
        write_outcomes(run, iteration, groups, "rollout-1")
        asked = [("s0", Judgement(judge="fair", verdict="1", pair=7)), ("s0", Judgement(item="length"))]
        write_judgements(run, iteration, asked, "rollout-1")
        write_judgements(run, iteration, asked, "evaluation-1", "evaluations")
        for kind in KINDS:
            write_metrics(run, kind, iteration, [{"loss": 1.0, "kl": 0.1}, {"loss": 0.5}])
    # what `sf evaluate` keeps of other measurements
    measured = RunDirectory(f"{run.measured_dir}/v00002-0a1b2c3d")
    configure(measured)
    write_trajectories(measured, 0, _rows(0), "evaluation-1", "evaluations")
    Path(run.measured_dir, "comparison.json").write_text("{}", encoding="utf-8")


def _rows(iteration: int) -> list[Trajectory]:
    said = [
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": "4 \N{GREEK SMALL LETTER PI}"},
    ]
    return [
        conversation(said, session_id=f"s{iteration}", reward_parts={"answer": 0.25, "form": 0.25}),
        conversation(
            [], session_id=f"t{iteration}", turns=[], reward_parts={}, reward=None, status="timeout"
        ),
    ]


def _held_out(row: Trajectory) -> Trajectory:
    return replace(row, group_id=None)
