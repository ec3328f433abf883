"""Whether a run can be taught by the teacher that its settings name, and what the teacher takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sf_core.config import RunConfig
from sf_core.engines.registry import engine_kind
from sf_core.models.cache_size import DTYPE_BYTES
from sf_core.models.context import longest_context
from sf_core.pictures.sight import read_sight
from sf_core.training import teacher_folder as folders
from sf_core.training.policy_folder import count_parameters, count_tower, read_model_config
from sf_core.training.teacher_folder import SETTING, TeacherFolder


def check_teacher(config: RunConfig, by_a_worker: bool) -> None:
    """Raises ValueError, one sentence, if the trainer cannot hold the teacher, the teacher is not there, or
    sequences may be longer than it is for. `by_a_worker`: its folder may exist only on a worker."""
    if config.train.teacher is None:
        return
    if (backend := config.train.backend or engine_kind(config).trainer) != "torch":
        raise ValueError(
            f"train.teacher: only train.backend torch learns from a teacher, not {backend}; leave one of the "
            "two out"
        )
    find_here(config, by_a_worker)
    positions = teacher_context(config)
    context = config.engine.context_length
    if context is None and config.policy.model is None:
        context = config.engine.context
    if positions is not None and context is not None and context > positions:
        raise ValueError(
            f"engine.context_length is {context}, but the teacher of train.teacher supports at most "
            f"{positions} tokens: lower engine.context_length, or use a teacher with a longer context"
        )


def check_tokens(config: RunConfig, policy: str | None, by_a_worker: bool) -> None:
    """Raises ValueError, one sentence that names the first difference, if a token of the policy is another
    one to the teacher. `policy`: the folder of the model; None: the built-in policy."""
    teacher = config.train.teacher
    found = find_here(config, by_a_worker)
    sees = config.policy.sees if policy is None else read_sight(policy) is not None
    if sees and teacher is not None and teacher.url is not None:
        raise ValueError(
            "train.teacher.url: a server receives token ids only, but the policy sees pictures: remove "
            f"the URL, and set {SETTING} to the folder of the teacher"
        )
    if sees and found is not None and read_sight(found.source) is None:
        raise ValueError(
            f"{SETTING}: {found.source} does not see pictures, but the policy does: use a teacher that "
            "sees pictures"
        )
    folder = None if found is None else found.source
    setting = SETTING
    if teacher is not None and teacher.tokenizer is not None:
        folder = teacher.tokenizer
        setting = "train.teacher.tokenizer"
    if folder is None:
        return
    if policy is None:
        # transformers is imported for it
        from sf_core.models.builtin import make_tokenizer

        tokenizer = make_tokenizer(config.policy.sees).backend_tokenizer
        rows = None
    else:
        tokenizer = folders.read_tokenizer(policy, "policy.model")
        rows = folders.count_rows(policy)
    folders.check_vocabulary(tokenizer, rows or tokenizer.get_vocab_size(), folder, setting)


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
            count_parameters(found.source) + count_tower(found.source)
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
