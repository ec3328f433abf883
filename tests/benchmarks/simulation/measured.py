"""A run directory as a short run leaves it: train manifests and timelines with known device-seconds."""

from __future__ import annotations

from sf_core.config import RunConfig
from sf_core.scheduling.timeline import Timeline
from storage.run_directory import RunDirectory
from tests.bench.runs import commit


def leave_run(uri: str, *, iterations: int, rollout: float, train: float) -> None:
    """Write a run whose iterations took these seconds of rollout, on two workers, and of training, on one."""
    directory = RunDirectory(uri)
    directory.write_config(RunConfig(run_id=directory.run_id))
    attempt = directory.begin_attempt()
    for worker, tag, seconds in (
        ("r0", "rollout", rollout / 2),
        ("t0", "rollout", rollout / 2),
        ("t0", "train", train),
    ):
        with Timeline(directory, worker, tag, f"1-{tag}") as timeline:
            for k in range(iterations):
                timeline.add("busy", tag, 1000.0 * k, 1000.0 * k + seconds)
    for k in range(iterations):
        commit(directory, k, "train", attempt=attempt)
