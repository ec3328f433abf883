"""The filter stage: decides which sealed trajectories train, and turns them into a batch with advantages."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sf_core.recipes.samples import Samples, Values
from sf_core.recipes.selections import AnySelection
from sf_core.recipes.tables import samples_of
from sf_core.recipes.weights import weigh
from sf_core.stages.commit import StageResult, commits_once
from sf_core.stages.run import OpenRun
from storage.tables.batches import TRAIN, write_batch
from storage.tables.trajectories import read_trajectories


@commits_once
def filter(run: OpenRun, iteration: int) -> StageResult:
    """Write the batch: the advantage and the weight of every token, unless the train step must make them.
    Raises ValueError if nothing of what was sampled trains, which no iteration would change."""
    source = run.directory.read_committed(iteration, "rollout")
    files = source.files("trajectories")
    rows = pa.concat_tables(read_trajectories(run.directory.path(ref.uri)) for ref in files)
    settings, sampled = run.config.train, samples_of(rows, iteration)
    decisions = decide(sampled, settings.select)
    trains = np.equal(decisions, TRAIN)
    kept = rows.filter(pa.array(trains))
    has_sampled = kept["min_version"].null_count < len(kept)
    if has_sampled and pc.any(pc.list_flatten(kept["loss_mask"])).as_py() is False:
        raise ValueError(
            f"no token of iteration {iteration} trains: every answer followed a schema. Have the agent ask "
            "without one, or name the field (response_format, ...) in rollout.ignored_fields"
        )
    advantages = weights = None
    figures = {}
    if not settings.needs:
        # made of what trains alone, so that what does not has no part in any mean or deviation
        samples = sampled if trains.all() else samples_of(kept, iteration)
        made = weigh(samples, settings.advantage, settings.weights)
        if settings.teacher is None:
            teaching = [bool(np.any(row)) for row in made[0]]
            of_sessions = np.bincount(samples.sessions, weights=teaching) > 0
            figures["zero_advantage_share"] = float(np.mean(~of_sessions))
        advantages, weights = (_in_places(values, trains, sampled) for values in made)
    batch = write_batch(
        run.directory,
        iteration,
        rows,
        advantages=advantages,
        weights=weights,
        decisions=decisions,
        part=f"batch-{run.ref.attempt}",
    )
    return StageResult(
        inputs={ref.uri: ref.sha256 for ref in files},
        outputs=[batch],
        data={
            "rows": len(rows),
            "reward_mean": float(sampled.rewards.mean()),
            **figures,
            "lags": lag_histogram(kept, iteration),
        },
    )


def decide(sampled: Samples, select: AnySelection | None) -> list[str]:
    """For each row TRAIN, or why its session does not train."""
    if select is None:
        return [TRAIN] * len(sampled.sessions)
    return [TRAIN if trains else select.reason for trains in select(sampled)[sampled.sessions]]


def _in_places(values: Values, trains: npt.NDArray[np.bool_], sampled: Samples) -> Values:
    """The values of the rows that train at their places among all rows; 0 at the others."""
    of_kept = iter(values)
    rows = zip(trains, sampled.masks, strict=True)
    return [next(of_kept) if does else np.zeros(len(mask), np.float32) for does, mask in rows]


def lag_histogram(rows: pa.Table, iteration: int) -> list[int]:
    """Number of trained tokens with lag 0, 1, ...; `rows` are trajectories."""
    mask = pc.list_flatten(rows["loss_mask"])
    versions = pc.list_flatten(rows["policy_versions"]).filter(mask).to_numpy()
    return [int(number) for number in np.bincount(iteration - versions)]
