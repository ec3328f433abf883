"""The train stage: makes the next version's weights from a batch, on one or several ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

from sf_core.scheduling.cluster import current_host, current_worker
from sf_core.scheduling.timeline import Timeline
from sf_core.stages.commit import Outcome, commit, committed
from sf_core.stages.lease import switching_of
from sf_core.stages.run import OpenRun, RunRef
from sf_core.training.gang import RankAssignment, check_counts
from sf_core.training.protocol import Trainer
from sf_core.training.registry import trainer_backend
from sf_core.training.seating import seated
from sf_core.training.stored_steps import stored_batch
from storage.files import FileRef, fenced
from storage.gangs import GangFiles
from storage.metrics import write_metrics


def train(ref: RunRef, iteration: int, seat: RankAssignment) -> dict[str, Any]:
    """One rank of the train step on the stored batch. Rank 0 writes the next version's weights and a
    checkpoint and commits; the others return when it has."""
    run = OpenRun(ref)
    if run.directory.read_manifest(iteration, "train") is None:
        files = GangFiles(run.directory, iteration, ref.attempt, seat.epoch)
        backend = trainer_backend(run.config)
        with ExitStack() as stack:
            with switching_of(run).not_counting():
                patience_s = run.config.train.gang_timeout_s
                ranks = stack.enter_context(seated(backend.meet, files, seat, current_host(), patience_s))
            check = partial(check_counts, files)
            trainer_at = partial(backend.trainer_at, run, iteration, ranks)
            work = partial(_train, run, iteration, seat, trainer_at, check)
            if seat.rank == 0:
                run.dataplane.report_stage(iteration, "train")
                commit(run, iteration, "train", work, check)
            else:
                work()
    return committed(run, iteration, "train").data


def _train(
    run: OpenRun,
    iteration: int,
    seat: RankAssignment,
    trainer_at: Callable[[], AbstractContextManager[Trainer]],
    check: Callable[[], None],
) -> Outcome:
    source = committed(run, iteration, "filter")
    step = f"train-{iteration}.{run.ref.attempt}"
    with Timeline(run.directory, current_worker(), "train", step) as timeline, ExitStack() as stack:
        with timeline.doing("moving", "load trainer", iteration):
            trainer = stack.enter_context(trainer_at())
            batch = stored_batch(run, iteration)
        switching_of(run).note_training(timeline)
        with timeline.doing("busy", "train", iteration):
            metrics = trainer.step(batch)
        # other tries write the same files, and may have committed them by now
        with timeline.doing("moving", "save", iteration), fenced(check):
            outputs = _write(run, iteration, trainer, metrics)
    return Outcome(
        inputs={ref.uri: ref.sha256 for ref in source.outputs},
        outputs=outputs,
        data={
            "version": trainer.version,
            "ranks": len(seat.workers),
            "device": trainer.device,
            # a later attempt may have other settings, and a replay of this step needs these
            "settings": run.config.train.model_dump(mode="json"),
            **metrics,
        },
    )


def _write(run: OpenRun, iteration: int, trainer: Trainer, metrics: dict[str, float]) -> list[FileRef]:
    """Store what the step made. Every rank calls it, and rank 0 gets the files."""
    version, config = trainer.version, run.config.train
    weights = trainer.save_weights(run.directory.weights_dir(version))
    if version % config.checkpoint_every == 0 or version == config.iterations:
        trainer.save_checkpoint(run.directory.checkpoint_dir(version))
    return [weights, write_metrics(run.directory, "train", iteration, [metrics])] if weights else []
