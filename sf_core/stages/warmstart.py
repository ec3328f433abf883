"""The warm start of a model: a run of its own within the run's directory, whose iterations are supervised. So
trainer, ranks, checkpoints, metrics and replay are those of any run. Its last version is the run's version 0.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from typing import Any

import numpy as np

from sf_core.config import RunConfig, TrainConfig
from sf_core.config.rollout_config import RolloutConfig
from sf_core.config.train_config import rate_for
from sf_core.dataplane.chat.renderer import open_renderer
from sf_core.models.language import copy_version
from sf_core.recipes.losses import LossConfig, Plain
from sf_core.scheduling.cluster import owner_of
from sf_core.stages.preflight.resolve import warm_rate
from sf_core.stages.run import OpenRun, RunRef, StageResult, commits_once
from sf_core.training.demonstrations import EncodedDemonstration, demonstrations, encode
from storage.files import FileRef, copy_folder, remove_folder
from storage.media import store_image
from storage.run_directory import Attempt, RunDirectory
from storage.tables.batches import write_batch
from storage.tables.schema import NOT_SAMPLED, Trajectory, TurnSpan
from storage.tables.trajectories import to_table
from storage.tensors.checkpoints import remove_checkpoint
from storage.tensors.weights import WEIGHT_FILES

MOST_STEPS = 10
"""Most optimiser steps of an iteration; a lost trainer repeats those since the last one."""


def begin_warmstart(ref: RunRef, parameters: int | None = None) -> RunRef:
    """Begin an attempt at the warm start of this run. `parameters`: size of the model. The learning rate
    follows it, so it must be known before anything is trained."""
    config = OpenRun(ref).config
    directory = RunDirectory(RunDirectory(ref.uri).warmstart_dir)
    directory.write_config(configure_warmstart(config, parameters))
    number = directory.begin_attempt(Attempt(dataplane="", host=socket.gethostname()))
    owner = owner_of(ref.run_id, ref.attempt)
    return RunRef(directory.run_id, directory.uri, "", number, secrets.token_hex(8), within=owner)


def configure_warmstart(config: RunConfig, parameters: int | None) -> RunConfig:
    """The settings of the warm start of a run with these settings."""
    warm = config.policy.warmstart
    steps = config.policy.warm_steps
    assert warm is not None
    per_iteration = max(n for n in range(1, MOST_STEPS + 1) if steps % n == 0)
    rate = None
    if parameters is not None:
        derived = rate_for(parameters, is_adapter=config.train.lora is not None)
        rate = warm_rate(warm, config.train.learning_rate or derived)
    train: dict[str, Any] = {
        "iterations": steps // per_iteration,
        "minibatches": per_iteration,
        "learning_rate": rate,
        # the loss of demonstrations is their mean surprise: each token has advantage 1, and nobody sampled it
        "loss": LossConfig(policy=Plain(), mean_over="token"),
        "advantage": TrainConfig().advantage,
        "weights": (),
        "critic": None,
        "max_engine_difference": 1e9,
        "checkpoint_every": 1,
        "keep_checkpoints": 1,
    }
    directory = RunDirectory(RunDirectory(config.run_dir).warmstart_dir)
    storage = config.storage.model_copy(update={"root": RunDirectory(config.run_dir).uri})
    return config.model_copy(
        update={
            "run_id": directory.run_id,
            "storage": storage,
            # nothing is sampled: what holds for samples does not hold
            "pipeline": None,
            "rollout": RolloutConfig(groups_per_batch=per_iteration),
            "train": config.train.model_copy(update=train),
        }
    )


def iterations_left(ref: RunRef) -> list[int]:
    """Iterations of the warm start that are not trained yet."""
    run = OpenRun(ref)
    numbers = range(run.config.train.iterations)
    return [number for number in numbers if run.directory.read_manifest(number, "train") is None]


def _write_demonstrations(run: OpenRun, iteration: int) -> StageResult:
    """Write the batch of an iteration of the warm start, in place of rollout and filter: demonstrations, a
    group for each step of the optimiser."""
    size = run.config.train.minibatches
    renderer = open_renderer(run.directory.start_dir)
    steps = range(iteration * size, (iteration + 1) * size)
    batches = zip(steps, demonstrations(run.config, steps), strict=True)
    rows = list[Trajectory]()
    for step, examples in batches:
        for number, demonstration in enumerate(examples):
            encoded = encode(renderer, demonstration)
            for png in encoded.files.values():
                store_image(run.directory.media_dir, png)
            rows.append(_trajectory(run.config, encoded, step, number, iteration))
    table = to_table(run.directory.run_id, rows, is_multimodal=renderer.image_processor is not None)
    table = table.add_column(1, "iteration", [np.full(len(rows), iteration, np.int32)])
    batch = write_batch(
        run.directory,
        iteration,
        table,
        advantages=[np.ones(row.token_ids.size, np.float32) for row in rows],
        weights=None,
        decisions=["train"] * len(rows),
        part=f"batch-{run.ref.attempt}",
    )
    return StageResult(outputs=[batch], data={"rows": len(rows)})


demonstrate = commits_once(_write_demonstrations, "filter")


def _trajectory(
    config: RunConfig, encoded: EncodedDemonstration, step: int, number: int, iteration: int
) -> Trajectory:
    is_answer = encoded.is_answer
    now = time.time()
    edges = np.flatnonzero(np.diff(is_answer, prepend=~is_answer[:1], append=~is_answer[-1:]))
    spans = [
        TurnSpan("assistant", start, end, "stop", "demonstration", temperature=1.0, top_p=1.0, top_k=0)
        if is_answer[start]
        else TurnSpan("user", start, end)
        for start, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    ]
    tools = encoded.demonstration.tools
    return Trajectory(
        policy="policy",
        task_id=f"demonstration-{step}-{number}",
        environment=config.environment.name,
        group_id=str(step),
        session_id=f"demonstration-{step}-{number}",
        branch_id="0",
        parent_branch_id=None,
        shared_prefix=0,
        token_ids=encoded.token_ids,
        loss_mask=is_answer,
        logprobs=np.where(is_answer, 0.0, np.nan).astype(np.float32),
        policy_versions=np.where(is_answer, iteration, NOT_SAMPLED).astype(np.int32),
        turns=spans,
        messages=json.dumps(encoded.demonstration.messages),
        reward=None,
        reward_parts={},
        status="finished",
        interruptions=0,
        started_at=now,
        finished_at=now,
        tools=json.dumps(tools) if tools else None,
        images=encoded.images,
    )


def remove_spare(ref: RunRef, trained: int) -> None:
    """Remove the weights of versions before this one, which nothing needs any more, and after the last one
    the checkpoint too. The batches stay, from which `sf replay` trains every step again."""
    run = OpenRun(ref)
    for version in run.directory.list_versions("weights"):
        if version < trained:
            remove_folder(run.directory.weights_dir(version))
    if trained == run.config.train.iterations:
        for version in run.directory.list_versions("checkpoints"):
            remove_checkpoint(run.directory.checkpoint_dir(version))


def find_warmed(uri: str) -> str:
    """Folder of what the warm start in this run directory has trained."""
    warm = RunDirectory(uri)
    return warm.weights_dir(warm.read_config(RunConfig).train.iterations)


def copy_warmed(uri: str, folder: str) -> list[FileRef]:
    """Copy the policy that the warm start in this run directory has made, without the adapter if it trained
    one; returns the copies."""
    warm = RunDirectory(uri)
    if warm.read_config(RunConfig).train.lora is not None:
        return copy_folder(warm.start_dir, folder)
    return [
        *copy_folder(warm.start_dir, folder, exclude=WEIGHT_FILES),
        *copy_version(warm.start_dir, find_warmed(uri), folder),
    ]
