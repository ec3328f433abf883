"""The inputs of a train step as stored in the run directory: its batch and its settings."""

from __future__ import annotations

import pyarrow as pa
from pydantic import ValidationError

from sf_core.config import TrainConfig
from sf_core.training.backends import TrainedRun
from storage.json_files import first_fault
from storage.tables.batches import read_batch
from storage.tables.scores import read_scores

COLUMNS = [
    "environment",
    "group_id",
    "session_id",
    "branch_id",
    "parent_branch_id",
    "shared_prefix",
    "token_ids",
    "loss_mask",
    "logprobs",
    "policy_versions",
    "turns",
    "reward",
    "reward_parts",
    "status",
    "advantages",
    "weights",
    "decision",
    "images",
]
"""Columns of a batch that a trainer reads, without the conversations as text."""


def read_stored_batch(run: TrainedRun, iteration: int) -> pa.Table:
    """The COLUMNS of a committed batch, and `teacher_logprobs` if a teacher at a URL was asked. Raises
    ValueError if it is not what the filter wrote."""
    manifest = run.directory.read_committed(iteration, "filter")
    run.directory.verify(manifest)
    [batch] = (run.directory.path(ref.uri) for ref in manifest.files("batches"))
    table = read_batch(batch, COLUMNS)
    for ref in manifest.files("scores"):
        table = table.append_column("teacher_logprobs", read_scores(run.directory.path(ref.uri), table))
    return table


def read_stored_settings(run: TrainedRun, iteration: int) -> TrainConfig:
    """Settings of a committed train step. Raises ValueError if its manifest holds something else."""
    manifest = run.directory.read_committed(iteration, "train")
    settings = manifest.data.get("settings")
    if isinstance(settings, dict):
        # a step that was stored without a rule was packed by the only one that there was
        settings = {"packing": "padded", **settings}
    try:
        return TrainConfig.model_validate(settings)
    except ValidationError as error:
        uri = run.directory.manifest_file(iteration, "train")
        raise ValueError(f"{uri}: data.settings is invalid: {first_fault(error)}") from None
