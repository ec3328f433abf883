"""The filter stage: turns sealed trajectories into a batch with advantages."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sf_core.recipes.advantages import ADVANTAGES, Advantage
from sf_core.stages.commit import Outcome, commits_once, committed
from sf_core.stages.run import OpenRun
from storage.batches import write_batch
from storage.parquet import numpy_rows
from storage.trajectories import first_rows, read_trajectories


@commits_once
def filter(run: OpenRun, iteration: int) -> Outcome:
    """Write the batch: every session's advantage on each of its trained tokens, 0 on the others."""
    source = committed(run, iteration, "rollout")
    rows = pa.concat_tables(read_trajectories(run.directory.path(ref.uri)) for ref in source.outputs)
    rewards, first = rows["reward"].to_numpy(), first_rows(rows["session_id"])
    settings = run.config.train
    advantages = session_advantages(
        ADVANTAGES[settings.advantage],
        rewards,
        _codes(rows["group_id"]),
        _codes(rows["session_id"]),
        scale=settings.scale_rewards,
    )
    batch = write_batch(
        run.directory,
        iteration,
        rows,
        advantages=[
            np.where(mask, advantage, 0.0).astype(np.float32)
            for mask, advantage in zip(numpy_rows(rows["loss_mask"]), advantages, strict=True)
        ],
        weights=[1.0] * len(rows),
        decisions=["train"] * len(rows),
        part=f"batch-{run.ref.attempt}",
    )
    return Outcome(
        inputs={ref.uri: ref.sha256 for ref in source.outputs},
        outputs=[batch],
        data={
            "rows": len(rows),
            "reward_mean": float(rewards[first].mean()),
            "zero_advantage_share": float(np.mean(advantages[first] == 0)),
            "lags": lag_histogram(rows, iteration),
        },
    )


def session_advantages(
    advantage: Advantage, rewards: np.ndarray, groups: np.ndarray, sessions: np.ndarray, *, scale: bool
) -> np.ndarray:
    """Advantage of each row [R], that of its session; the branches of a session count once in its group."""
    _, first, inverse = np.unique(sessions, return_index=True, return_inverse=True)
    advantages: np.ndarray = advantage(rewards[first], groups[first], scale=scale)[inverse]
    return advantages


def lag_histogram(rows: pa.Table, iteration: int) -> list[int]:
    """Number of trained tokens with lag 0, 1, ...; `rows` are trajectories."""
    mask = pc.list_flatten(rows["loss_mask"])
    versions = pc.list_flatten(rows["policy_versions"]).filter(mask).to_numpy()
    return [int(number) for number in np.bincount(iteration - versions)]


def _codes(column: pa.ChunkedArray) -> np.ndarray:
    codes: np.ndarray = pc.dictionary_encode(column.combine_chunks()).indices.to_numpy()
    return codes
