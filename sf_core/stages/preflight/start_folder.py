"""Whether a run can start from its policy, and the folder that it starts from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sf_core.config import RunConfig
from sf_core.config.rollout_config import BUILT_IN_CONTEXT
from sf_core.dataplane.chat.renderer import open_renderer
from sf_core.engines.registry import engine_kind
from sf_core.models.adapter import list_linears, read_adapter
from sf_core.models.cache_size import built_in_shape
from sf_core.models.context import check_context
from sf_core.pictures.sight import SEEING, read_sight
from sf_core.reports.view import RunView
from sf_core.scheduling.cluster import scheduler_of
from sf_core.stages.preflight.idle import check_idle, check_reach
from sf_core.stages.preflight.judges import check_judges
from sf_core.stages.preflight.lora import (
    TrainedAdapter,
    check_lora,
    check_peft,
    find_adapter,
    shape_adapter,
)
from sf_core.stages.preflight.stored_config import has_started
from sf_core.stages.preflight.teacher import check_teacher, check_tokens
from sf_core.training.demonstrations import check_demonstrations, demonstrations, encode
from sf_core.training.policy_folder import check_model_folder, policy_folder, read_model_config
from sf_core.training.registry import trainer_kind
from sf_core.training.teacher_folder import check_version
from storage.run_directory import RunDirectory
from storage.tensors.weights import has_weights


def warms_model(config: RunConfig) -> bool:
    """Whether a model is trained on demonstrations before the run."""
    return config.policy.model is not None and config.policy.warm_steps > 0


def check_start(config: RunConfig, *, by_a_worker: bool = False) -> None:
    """Raises ValueError if a run cannot start from its policy, nothing is there to warm-start it with, its
    sequences are too long for it, or engine, trainer and adapter do not go together. A run that has started
    needs only the copy in its directory, which is version 0, and not `policy.model`.

    by_a_worker: the folder may exist only on the worker that copies it; then the worker checks it."""
    check_idle(config)
    check_lora(config)
    check_judges(config)
    check_teacher(config, by_a_worker)
    kind = trainer_kind(config)
    length = config.engine.context_length
    runs_policy = engine_kind(config).runs_policy
    folder = None
    if has_started(config):
        _check_own_files(config)
    else:
        check_demonstrations(config)
    if config.policy.model is None:
        if runs_policy and length is not None and length > BUILT_IN_CONTEXT:
            raise ValueError(
                f"engine.context_length ({length}) must not exceed the {BUILT_IN_CONTEXT} positions of the "
                "built-in policy"
            )
        shape = name_built_in_shape(config)
    elif (folder := folder_to_start_from(config, by_a_worker)) is not None:
        shape = read_model_config(folder)
        if runs_policy and length is not None:
            check_context(shape, length)
        if warms_model(config):
            for shown in demonstrations(config, range(1))[0][:1]:
                encode(open_renderer(folder), shown)
    else:
        return
    check_tokens(config, folder, by_a_worker)
    _check_sight(config, str(shape.get("model_type")), folder)
    kind.check_shape(shape, config.train)
    if scheduler_of(config) is None:
        # then the workers are of this machine
        engine_kind(config).check_shape(shape)
        if config.train.lora is not None:
            check_peft(shape)
    if config.train.lora is not None:
        if not has_started(config):
            check_reach(config, shape)
        adapter_to_start_from(config, shape, by_a_worker)


def name_built_in_shape(config: RunConfig) -> dict[str, Any]:
    """The shape of the built-in policy, named as in Hugging Face's config.json."""
    shape = built_in_shape(config.policy.hidden_size, config.policy.num_layers)
    return {"model_type": SEEING[0] if config.policy.sees else "qwen3", **shape}


def _check_sight(config: RunConfig, kind: str, folder: str | None) -> None:
    """Raises ValueError, one sentence, if a policy of this `model_type` is not shown what it sees, or is said
    to see otherwise. `folder`: that of the model; None: the built-in policy."""
    engine = config.engine.kind
    most = config.rollout.max_picture_tokens
    if config.policy.sees and config.policy.model is not None:
        raise ValueError(
            "policy.sees applies only to the built-in policy: leave policy.sees out with policy.model"
        )
    if kind in SEEING and not engine_kind(config).shows_pictures:
        raise ValueError(
            f"engine.kind {engine} does not support pictures, but the policy, a {kind}, sees pictures: use "
            "engine.kind vllm"
        )
    if kind not in SEEING and most is not None:
        raise ValueError(
            f"rollout.max_picture_tokens ({most}) applies only to policies that see pictures, but this "
            f"policy, a {kind}, does not see pictures: leave rollout.max_picture_tokens out"
        )
    if folder is not None and (sight := read_sight(folder)) is not None:
        sight.limit(most)


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


def _check_own_files(config: RunConfig) -> None:
    """Raises ValueError, one sentence, if the weights from which a run goes on are not all those of its
    policy: version 0, the newest version and the reference of `train.loss.kl`."""
    if not trainer_kind(config).computes_weights:
        return
    run = RunDirectory(config.run_dir)
    newest = RunView(run).progress().published
    reference = config.train.loss.reference_of(newest)
    for version in sorted({0, newest, reference}):
        check_version(run, version, "restore the file from a copy")


def start_fault(run: RunDirectory) -> str | None:
    """Why the data plane would refuse the run's start folder; None if it would not."""
    try:
        open_renderer(run.start_dir)
    except ValueError as error:
        return str(error)
    return None
