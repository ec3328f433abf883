"""The train stage: makes the next version's weights from a batch, on one or several ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from sf_core.config import RunConfig, TrainConfig
from sf_core.engines.registry import engine_kind
from sf_core.process.limits import trim_memory
from sf_core.reports.outcomes.figures import rollout_metrics
from sf_core.scheduling.lending import Switching
from sf_core.scheduling.timeline import Timeline
from sf_core.scheduling.worker_state import WorkerState
from sf_core.stages.retention import find_removable_checkpoints
from sf_core.stages.run import OpenRun, RunRef, StageResult, commit
from sf_core.training.backends import Trainer, trainer_backend
from sf_core.training.gang import RankAssignment, check_counts, check_goes_on, join_gang
from sf_core.training.stored_steps import read_stored_batch
from sf_core.waits import waiting_for
from storage.files import FileRef, fence
from storage.gangs import GangFiles
from storage.tables.metrics import write_metrics


def train(worker: WorkerState, ref: RunRef, iteration: int, assignment: RankAssignment) -> dict[str, Any]:
    """One rank of the train step on the stored batch. Rank 0 writes the next version's weights and commits.
    Then all begin to store a checkpoint, which goes on beside the next step; the others return after rank
    0."""
    run = OpenRun(ref)
    if run.directory.read_manifest(iteration, "train") is None:
        files = GangFiles(run.directory, iteration, ref.attempt, assignment.step_attempt)
        backend = trainer_backend(run.config, worker)
        switching = worker.measure_switches(ref.uri, run.config.cluster.max_switches_per_minute)
        with ExitStack() as stack:
            with switching.not_counting():
                patience_s = run.config.train.gang_timeout_s
                ranks = stack.enter_context(
                    join_gang(backend.meet, files, assignment, worker.host, patience_s)
                )
            trainer = backend.trainer_at(run, iteration, ranks)
            timeline = Timeline(run.directory, worker.name, "train", f"train-{iteration}.{ref.attempt}")
            step = _step(run, iteration, assignment, trainer, files, timeline, switching)
            if assignment.rank == 0:
                run.report_stage(iteration, "train")
                commit(
                    run, iteration, "train", partial(stack.enter_context, step), partial(check_counts, files)
                )
            else:
                stack.enter_context(step)
    return run.directory.read_committed(iteration, "train").data


_COMPARED_TOKENS = 64
"""Fewest tokens whose mean difference says something: in bfloat16 single ones differ by up to half a nat."""

_COMPARED_EVERY = 10
"""Number of iterations between comparisons of engines on tokens of an earlier version."""


@contextmanager
def _step(
    run: OpenRun,
    iteration: int,
    assignment: RankAssignment,
    opening: AbstractContextManager[Trainer],
    gang: GangFiles,
    timeline: Timeline,
    switching: Switching,
) -> Iterator[StageResult]:
    """Make the next version; the block commits it, and at its end the checkpoint is begun."""
    source = run.directory.read_committed(iteration, "filter")
    with timeline, ExitStack() as stack:
        with timeline.record("moving", "load trainer", iteration):
            trainer = stack.enter_context(opening)
            batch = read_stored_batch(run, iteration)
        switching.note_training(timeline)
        with timeline.record("busy", "train", iteration):
            metrics = trainer.step(batch)
        # what comes until the next step needs no room for activations
        trim_memory()
        if _compares_earlier(iteration, metrics):
            with timeline.record("busy", "compare engines", iteration):
                metrics |= trainer.compare_engines(batch, list_comparable(run))
        check_engines(run.config, iteration, metrics)
        has_checkpoint = _is_due(run.config.train, trainer.version)
        # other tries write the same files, and may have committed them by now
        with timeline.record("moving", "save", iteration), fence(partial(check_counts, gang)):
            outputs = _write(run, iteration, trainer, metrics)
            if has_checkpoint:
                _complete(run, trainer, assignment, iteration)
        yield StageResult(
            inputs={ref.uri: ref.sha256 for ref in source.outputs},
            outputs=outputs,
            data={
                "version": trainer.version,
                "ranks": len(assignment.workers),
                "device": trainer.device,
                **({"teacher": digest} if (digest := trainer.teacher_digest) else {}),
                # a later attempt may have other settings, and a replay of this step needs these
                "settings": run.config.train.model_dump(mode="json"),
                **metrics,
            },
        )
        if has_checkpoint:
            with timeline.record("moving", "save", iteration), fence(partial(check_goes_on, gang)):
                trainer.save_checkpoint(run.directory.checkpoint_dir(trainer.version))
                if trainer.version == run.config.train.iterations:
                    _complete(run, trainer, assignment, trainer.version)


def _is_due(config: TrainConfig, version: int) -> bool:
    return version % config.interval == 0 or version == config.iterations


def _complete(run: OpenRun, trainer: Trainer, assignment: RankAssignment, committed: int) -> None:
    """Wait for the checkpoint that is being stored, and remove older ones that need not stay when this is the
    newest version that is committed."""
    with waiting_for("the checkpoint that is being stored", run.config.cluster.stage_timeout_s):
        trainer.await_checkpoint()
    if assignment.rank == 0:
        for spare in find_removable_checkpoints(run.directory, committed, run.config.train):
            spare.remove()


def _compares_earlier(iteration: int, metrics: Mapping[str, float]) -> bool:
    """Whether engines are compared on tokens of an earlier version, because the step had too few of its own.
    That loads the weights of this version, so it is done in the second iteration and in every tenth."""
    return metrics.get("engine_difference_tokens", math.inf) < _COMPARED_TOKENS and (
        iteration == 1 or iteration % _COMPARED_EVERY == 0
    )


def list_comparable(run: OpenRun) -> list[int]:
    """Versions whose weights are stored; that of the start is apart from the others."""
    return [0, *run.directory.list_versions("weights")]


def check_engines(config: RunConfig, iteration: int, metrics: Mapping[str, float]) -> None:
    """Raises ValueError if what engines reported of tokens of a version is not what the trainer computes: the
    policy would be taught by the ratio of two different ones."""
    if not engine_kind(config).runs_policy:
        return
    _check_difference(config, iteration, metrics, "engine_difference")
    earlier = metrics.get("lagged_difference_version", math.nan)
    _check_difference(config, earlier, metrics, "lagged_difference")


def _check_difference(config: RunConfig, version: float, metrics: Mapping[str, float], name: str) -> None:
    difference = metrics.get(f"{name}_mean", math.nan)
    bound = config.train.max_engine_difference
    is_known = metrics.get(f"{name}_tokens", 0) >= _COMPARED_TOKENS
    if is_known and difference > bound:
        raise ValueError(
            f"engines and trainer disagree on version {version:.0f}: the log-probs of its tokens differ by "
            f"{difference:.3g} on average, but train.max_engine_difference is {bound:g}; check that engines "
            "use the weights, dtype and images of the trainer, and do not return raw log-probs"
        )


def _write(run: OpenRun, iteration: int, trainer: Trainer, metrics: dict[str, float]) -> list[FileRef]:
    """Store what the step made. Every rank calls it, and rank 0 gets the files."""
    version = trainer.version
    weights = trainer.save_weights(run.directory.weights_dir(version), run.weights(version - 1).uri)
    if not weights:
        return []
    chosen = rollout_metrics(run.directory.read_manifest(iteration, "rollout"))
    return [*weights, write_metrics(run.directory, "train", iteration, [metrics | chosen])]
