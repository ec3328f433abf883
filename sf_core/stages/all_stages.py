"""The stages of a run: read what the last stage committed, do one thing, commit a manifest.

Doing a committed stage again returns its manifest and changes nothing (design 5.6).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sf_core.recipes.advantages import group_advantages
from sf_core.reports.devices import draw_timelines, record_figures
from sf_core.reports.summary import summarise
from sf_core.reports.tensorboard import write_events
from sf_core.scheduling.plan import current_host, current_worker
from sf_core.scheduling.timeline import Timeline
from sf_core.stages.policy_folders import export_policy, prepare_start, start_fault
from sf_core.stages.run import Run, RunRef
from sf_core.stages.switching import switching_of
from sf_core.training.gang import Seat, check_counts
from sf_core.training.stored_steps import stored_batch
from sf_core.waits import collect_waits
from storage.batches import write_batch
from storage.files import FileRef, fenced
from storage.gangs import GangFiles
from storage.manifests import Manifest
from storage.metrics import write_metrics
from storage.parquet import numpy_rows
from storage.trajectories import first_rows, read_trajectories

if TYPE_CHECKING:
    # torch is loaded only where training runs
    from sf_core.training.torch.ranks import Ranks
    from sf_core.training.torch.trainer import Trainer

log = logging.getLogger(__name__)


@dataclass
class Outcome:
    """What a stage read, wrote and found out."""

    inputs: dict[str, str] = field(default_factory=dict)
    outputs: list[FileRef] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)


TrainerAt = Callable[..., AbstractContextManager[Any]]
Stage = Callable[..., dict[str, Any]]
"""Called with a RunRef, an iteration, and what else `work` takes."""


def _once(work: Callable[..., Outcome]) -> Stage:
    """Make a stage of `work`: a committed one answers from its manifest, others run and commit."""
    name = work.__name__

    def stage(ref: RunRef, iteration: int, *more: Any) -> dict[str, Any]:
        run = Run(ref)
        manifest = run.directory.read_manifest(iteration, name)
        if manifest is None:
            run.dataplane.report_stage(iteration, name)
            manifest = _commit(run, iteration, name, lambda: work(run, iteration, *more))
        return manifest.data

    stage.__name__, stage.__doc__ = name, work.__doc__
    return stage


def _commit(
    run: Run,
    iteration: int | None,
    name: str,
    work: Callable[[], Outcome],
    check: Callable[[], None] = lambda: None,
) -> Manifest:
    """`check` is called directly before the manifest is written."""
    started = time.time()
    with collect_waits() as waits:
        outcome = work()
    times = {"started_at": started, "finished_at": time.time(), "waits": waits}
    manifest = Manifest(
        run_id=run.ref.run_id,
        iteration=iteration,
        stage=name,
        attempt=run.ref.attempt,
        inputs=outcome.inputs,
        outputs=outcome.outputs,
        data=outcome.data | times,
    )
    with fenced(check):
        return run.directory.commit_manifest(manifest)


def _committed(run: Run, iteration: int, name: str) -> Manifest:
    manifest = run.directory.read_manifest(iteration, name)
    assert manifest is not None, f"{name} of iteration {iteration} must be committed first"
    return manifest


def start(ref: RunRef) -> dict[str, Any]:
    """Put the policy that the run starts from, version 0, into the run directory: once, or again where what
    was put cannot be used, and so has served nobody. Raises ValueError if it is there and is not what was
    put."""
    run = Run(ref)

    def work() -> Outcome:
        copies, source = prepare_start(run.start_dir, run.config)
        return Outcome(outputs=copies, data={"source": source})

    if (manifest := run.directory.read_manifest(None, "start")) is not None:
        # every version is sampled and trained with its tokenizer and configuration
        run.directory.verify(manifest)
        if (fault := start_fault(run.directory)) is None:
            return manifest.data
        log.warning("%s; it is made again from policy.model", fault)
        run.directory.refuse_superseded(ref.attempt, "make the start folder again")
        run.directory.discard_start()
    return _commit(run, None, "start", work).data


@_once
def rollout(run: Run, iteration: int) -> Outcome:
    """Wait until the batch is full, then let the data plane seal its trajectories."""
    settings = run.config.rollout
    run.dataplane.wait_for_batch(iteration, settings.batch_timeout_s, settings.absence_timeout_s)
    sealed = run.dataplane.seal_batch(iteration, run.ref.attempt)
    return Outcome(outputs=[FileRef(**ref) for ref in sealed.pop("files")], data=sealed)


@_once
def filter(run: Run, iteration: int) -> Outcome:
    """Map every session's advantage onto its sampled tokens and write the batch."""
    source = _committed(run, iteration, "rollout")
    rows = pa.concat_tables(read_trajectories(run.directory.path(ref.uri)) for ref in source.outputs)
    rewards, first = rows["reward"].to_numpy(), first_rows(rows["session_id"])
    advantages = session_advantages(
        rewards, _codes(rows["group_id"]), _codes(rows["session_id"]), scale=run.config.train.scale_rewards
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
    rewards: np.ndarray, groups: np.ndarray, sessions: np.ndarray, *, scale: bool
) -> np.ndarray:
    """Group-relative advantage of each row [R]; the branches of a session count once in its group."""
    _, first, inverse = np.unique(sessions, return_index=True, return_inverse=True)
    advantages: np.ndarray = group_advantages(rewards[first], groups[first], scale=scale)[inverse]
    return advantages


def lag_histogram(rows: pa.Table, iteration: int) -> list[int]:
    """How many trained tokens have lag 0, 1, ...; `rows` are trajectories."""
    mask = pc.list_flatten(rows["loss_mask"])
    versions = pc.list_flatten(rows["policy_versions"]).filter(mask).to_numpy()
    return [int(number) for number in np.bincount(iteration - versions)]


def _codes(column: pa.ChunkedArray) -> np.ndarray:
    codes: np.ndarray = pc.dictionary_encode(column.combine_chunks()).indices.to_numpy()
    return codes


def train(ref: RunRef, iteration: int, seat: Seat) -> dict[str, Any]:
    """One rank of the train step on the stored batch. Rank 0 writes the next version's weights and a
    checkpoint and commits; the others return when it has."""
    run = Run(ref)
    if run.directory.read_manifest(iteration, "train") is None:
        files = GangFiles(run.directory, iteration, ref.attempt, seat.epoch)
        seated, trainer_at = _backend(run)
        with ExitStack() as stack:
            with switching_of(run).not_counting():
                patience_s = run.config.train.gang_timeout_s
                ranks = stack.enter_context(seated(files, seat, current_host(), patience_s))
            check = partial(check_counts, files)
            work = partial(_train, run, iteration, trainer_at, ranks, check)
            if seat.rank == 0:
                run.dataplane.report_stage(iteration, "train")
                _commit(run, iteration, "train", work, check)
            else:
                work()
    return _committed(run, iteration, "train").data


def _backend(run: Run) -> tuple[Any, TrainerAt]:
    """How ranks meet and who trains: torch, or clocks."""
    if run.config.engine.kind == "emulated":
        from sf_core.training import emulated

        return emulated.seated, emulated.trainer_at
    from sf_core.training.resident import trainer_at
    from sf_core.training.torch.rendezvous import seated

    return seated, trainer_at


def _train(
    run: Run, iteration: int, trainer_at: TrainerAt, ranks: Ranks, check: Callable[[], None]
) -> Outcome:
    source = _committed(run, iteration, "filter")
    step = f"train-{iteration}.{run.ref.attempt}"
    with Timeline(run.directory, current_worker(), "train", step) as timeline, ExitStack() as stack:
        with timeline.doing("moving", "load trainer", iteration):
            trainer = stack.enter_context(trainer_at(run, iteration, ranks))
            batch = stored_batch(run, iteration)
        switching_of(run).note_training(timeline)
        with timeline.doing("busy", "train", iteration):
            metrics = trainer.step(batch)
        # other tries write the same files, and what they wrote may count by now
        with timeline.doing("moving", "save", iteration), fenced(check):
            outputs = _write(run, iteration, trainer, metrics) if ranks.rank == 0 else []
    return Outcome(
        inputs={ref.uri: ref.sha256 for ref in source.outputs},
        outputs=outputs,
        data={
            "version": trainer.version,
            "ranks": ranks.size,
            "device": trainer.device,
            # a later attempt may have others, and this step must be made again as it was
            "settings": run.config.train.model_dump(mode="json"),
            **metrics,
        },
    )


def _write(run: Run, iteration: int, trainer: Trainer, metrics: dict[str, float]) -> list[FileRef]:
    version, config = trainer.version, run.config.train
    weights = trainer.save_weights(run.directory.weights_dir(version))
    if version % config.checkpoint_every == 0 or version == config.iterations:
        trainer.save_checkpoint(run.directory.checkpoint_dir(version))
    return [weights, write_metrics(run.directory, "train", iteration, [metrics])]


@_once
def publish(run: Run, iteration: int) -> Outcome:
    """Hand the weights of the train stage to every engine; done when none samples with older ones."""
    source = _committed(run, iteration, "train")
    version = int(source.data["version"])
    # engines believe what they load
    run.directory.verify(source)
    if run.config.engine.kind == "emulated":
        from sf_core.engines.emulated_device import device_model

        time.sleep(device_model(run.config).verify_s())
    answer = run.dataplane.publish(version, run.weights(version).uri)
    return Outcome(inputs={"weights": source.outputs[0].sha256}, data={"version": version, **answer})


@_once
def evaluate(run: Run, version: int, num_tasks: int | None = None) -> Outcome:
    """Mean reward of this version on so many held-out tasks, by default as configured; these sessions never
    train. An evaluation that has begun is ended with the number it began with. Raises ValueError if engines
    serve another version."""
    run.refuse_unserved(version)
    settings = run.config.rollout
    run.dataplane.start_evaluation(version, num_tasks or run.config.evaluate.num_tasks)
    run.dataplane.wait_for_evaluation(version, settings.batch_timeout_s, settings.absence_timeout_s)
    sealed = run.dataplane.seal_evaluation(version, run.ref.attempt)
    files = [FileRef(**ref) for ref in sealed.pop("files")]
    rewards = {"reward_mean": sealed["reward_mean"]}
    rewards |= {f"reward_{name}": value for name, value in sealed["by_environment"].items()}
    files.append(write_metrics(run.directory, "evaluation", version, [rewards]))
    return Outcome(outputs=files, data=sealed)


def finish(ref: RunRef) -> dict[str, Any]:
    """Write the trained policy as a Hugging Face folder, figures, timelines, the summary and its picture.
    Raises ValueError if a later attempt has begun."""
    run = Run(ref)
    run.directory.refuse_superseded(ref.attempt, "end the run")
    export_policy(run)
    record_figures(run.directory, run.config.train.iterations - 1, is_over=True)
    write_events(run.directory, run.config.train.iterations - 1)
    draw_timelines(run.directory)
    return summarise(run.directory, run.config)
