"""The teacher that the settings of a run name, and what it takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sf_core.config import RunConfig
from sf_core.models.context import DTYPE_BYTES, longest_context
from sf_core.training import teacher_folder as folders
from sf_core.training.policy_folder import count_parameters, count_vision_tower, read_model_config
from sf_core.training.teacher_folder import SETTING, TeacherFolder


def find_here(config: RunConfig, by_a_worker: bool = True) -> TeacherFolder | None:
    """The folder of the teacher that trainers hold; None if there is none, or it is only on a worker. Raises
    ValueError if it cannot be used."""
    teacher = config.train.teacher
    if teacher is None or teacher.model is None or (by_a_worker and not folders.is_here(teacher.model)):
        return None
    return folders.find_teacher(teacher.model)


def teacher_context(config: RunConfig) -> int | None:
    """Tokens of the longest sequence that the teacher is for; None if that is not known here."""
    found = find_here(config)
    return None if found is None else longest_context(read_model_config(found.source, SETTING))


def frozen_bytes(config: RunConfig, version: int) -> int:
    """Count the bytes of all models that are held and not trained: the teacher and the reference of
    `train.loss.kl`. `version` is the size of a version of the policy in bytes."""
    train = config.train
    found = find_here(config)
    taught = 0
    if found is not None:
        dtype = read_dtype(read_model_config(found.source, SETTING))
        taught = (DTYPE_BYTES | {"float16": 2}).get(dtype, 4) * (
            count_parameters(found.source) + count_vision_tower(found.source)
        )
    # None: the start, which is held once for both
    versions = set() if train.loss.kl is None else {train.loss.kl.renew_every}
    if train.teacher is not None and train.teacher.weights is not None:
        versions.add(None)
    # with an adapter, that of another version stands in
    return taught + (0 if train.lora is not None else len(versions) * version)


def explain_teacher(config: RunConfig, policy: int) -> str:
    """What the teacher is and costs, in words. `policy`: number of the policy's parameters."""
    teacher = config.train.teacher
    found = find_here(config)
    assert teacher is not None
    if teacher.url is not None:
        return (
            f"the server at {teacher.url}, which the filter stage asks for the log-probs of each batch; each "
            "step has one more forward pass through the policy"
        )
    parameters = policy
    about = teacher.model or "version 0 of the policy"
    if found is not None:
        shape = read_model_config(found.source, SETTING)
        parameters = count_parameters(found.source)
        about += (
            f": {shape.get('model_type')}, {parameters / 1e6:,.1f} million parameters in {read_dtype(shape)}"
        )
    elif teacher.model is not None:
        about += ", which is on a worker"
    elif config.train.lora is not None:
        about += ", which needs no memory in addition to the adapter"
    about += "; each step has one more forward pass through it"
    if not teacher.is_loss:
        about = f"{about} and one through the policy"
        parameters = parameters + policy
    if teacher.model is not None and found is None:
        return about
    # a forward pass is a third of a pass with its backward pass
    share = parameters / (policy * (4 if config.train.recompute else 3))
    return f"{about}, about {share:.0%} more computing"


def read_dtype(shape: Mapping[str, Any]) -> str:
    """The dtype in which a model is held, by its configuration."""
    own = shape.get("text_config") or {}
    names = (place.get(key) for place in (shape, own) for key in ("dtype", "torch_dtype"))
    return str(next(filter(None, names), "float32"))
