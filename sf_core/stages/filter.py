"""The filter stage: turns sealed trajectories into a batch with advantages."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sf_core.recipes.tables import samples_of
from sf_core.recipes.weights import taught
from sf_core.stages.commit import Outcome, commits_once, committed
from sf_core.stages.run import OpenRun
from storage.batches import write_batch
from storage.trajectories import read_trajectories


@commits_once
def filter(run: OpenRun, iteration: int) -> Outcome:
    """Write the batch: the advantage and the weight of every token, unless the train step must make them.
    Raises ValueError if nothing of what was sampled trains, which no iteration would change."""
    source = committed(run, iteration, "rollout")
    files = source.files("trajectories")
    rows = pa.concat_tables(read_trajectories(run.directory.path(ref.uri)) for ref in files)
    settings, samples = run.config.train, samples_of(rows, iteration)
    if pc.any(pc.list_flatten(rows["loss_mask"])).as_py() is False and rows["min_version"].null_count < len(
        rows
    ):
        raise ValueError(
            f"no token of iteration {iteration} trains: every answer followed a schema. Have the agent ask "
            "without one, or name the field (response_format, ...) in rollout.ignored_fields"
        )
    advantages = weights = None
    figures = {}
    if not settings.needs:
        advantages, weights = taught(samples, settings.advantage, settings.weights)
        teaching = [bool(np.any(row)) for row in advantages]
        of_sessions = np.bincount(samples.sessions, weights=teaching) > 0
        figures["zero_advantage_share"] = float(np.mean(~of_sessions))
    batch = write_batch(
        run.directory,
        iteration,
        rows,
        advantages=advantages,
        weights=weights,
        decisions=["train"] * len(rows),
        part=f"batch-{run.ref.attempt}",
    )
    return Outcome(
        inputs={ref.uri: ref.sha256 for ref in files},
        outputs=[batch],
        data={
            "rows": len(rows),
            "reward_mean": float(samples.rewards.mean()),
            **figures,
            "lags": lag_histogram(rows, iteration),
        },
    )


def lag_histogram(rows: pa.Table, iteration: int) -> list[int]:
    """Number of trained tokens with lag 0, 1, ...; `rows` are trajectories."""
    mask = pc.list_flatten(rows["loss_mask"])
    versions = pc.list_flatten(rows["policy_versions"]).filter(mask).to_numpy()
    return [int(number) for number in np.bincount(iteration - versions)]
