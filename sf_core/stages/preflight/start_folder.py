"""The policy that a run starts from: its folder, its shape and its adapter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sf_core.config import RunConfig
from sf_core.dataplane.chat.renderer import open_renderer
from sf_core.models.adapter import list_linears, read_adapter
from sf_core.models.context import builtin_shape
from sf_core.models.images.processor_config import MULTIMODAL_MODEL_TYPES
from sf_core.stages.preflight.lora import (
    TrainedAdapter,
    find_adapter,
    shape_adapter,
)
from sf_core.stages.preflight.stored_config import has_started
from sf_core.training.policy_folder import check_model_folder, policy_folder
from storage.run_directory import RunDirectory
from storage.tensors.weights import has_weights


def warms_model(config: RunConfig) -> bool:
    """Whether a model is trained on demonstrations before the run."""
    return config.policy.model is not None and config.policy.warm_steps > 0


def name_built_in_shape(config: RunConfig) -> dict[str, Any]:
    """The shape of the built-in policy, named as in Hugging Face's config.json."""
    shape = builtin_shape(config.policy.hidden_size, config.policy.num_layers)
    return {"model_type": MULTIMODAL_MODEL_TYPES[0] if config.policy.sees else "qwen3", **shape}


def folder_to_start_from(config: RunConfig, by_a_worker: bool) -> str | None:
    """The run's own copy, else `policy.model`; None if that is only on the worker. Raises ValueError if it
    cannot be used."""
    assert config.policy.model is not None
    model = policy_folder(config.policy.model)
    if has_started(config) and start_fault(run := RunDirectory(config.run_dir)) is None:
        return run.start_dir
    if by_a_worker and not Path(model).is_dir():
        return None
    check_model_folder(model)
    return model


def adapter_to_start_from(
    config: RunConfig, shape: Mapping[str, Any], by_a_worker: bool
) -> TrainedAdapter | None:
    """The run's own adapter, else that with which it begins, for a policy of this shape; None if that is only
    on the worker. Raises ValueError if it cannot be trained."""
    linears = list_linears(shape)
    folder = config.policy.adapter
    if has_started(config) and has_weights(own := RunDirectory(config.run_dir).start_adapter_dir):
        return shape_adapter(read_adapter(own), linears, "train.lora")
    if folder is not None and by_a_worker and not Path(folder).is_dir():
        return None
    return find_adapter(config, linears)


def start_fault(run: RunDirectory) -> str | None:
    """Why the data plane would refuse the run's start folder; None if it would not."""
    try:
        open_renderer(run.start_dir)
    except ValueError as error:
        return str(error)
    return None
