"""Whether a run can be taught by the teacher that its settings name, and what the teacher takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

from sf_core.config import RunConfig
from sf_core.engines.registry import engine_kind
from sf_core.models.cache_size import DTYPE_BYTES
from sf_core.models.context import longest_context
from sf_core.training.policy_folder import count_parameters, read_model_config
from sf_core.training.teacher_folder import (
    SETTING,
    TeacherFolder,
    check_vocabulary,
    count_rows,
    find_teacher,
    is_here,
)
from storage.files import join, read_bytes

SETTING_AT_URL = "train.teacher.tokenizer"


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
    positions, context = teacher_context(config), config.engine.context_length
    if context is None and config.policy.model is None:
        context = config.engine.context
    if positions is not None and context is not None and context > positions:
        raise ValueError(
            f"engine.context_length is {context}, and the teacher of train.teacher is for at most "
            f"{positions} tokens: lower it, or name a teacher that reads as many"
        )


def check_tokens(config: RunConfig, policy: str | None, by_a_worker: bool) -> None:
    """Raises ValueError, one sentence that names the first difference, if a token of the policy is another
    one to the teacher. `policy`: the folder of the model; None: the built-in policy."""
    teacher = config.train.teacher
    if teacher is None or teacher.weights is not None:
        return
    folder, setting = teacher.tokenizer, "train.teacher.tokenizer"
    if teacher.model is not None:
        found = find_here(config, by_a_worker)
        folder, setting = None if found is None else found.source, SETTING
    if folder is not None:
        tokenizer = _open_tokenizer(policy)
        rows = count_rows(policy) if policy is not None else None
        check_vocabulary(tokenizer, rows or tokenizer.get_vocab_size(), folder, setting)


def find_here(config: RunConfig, by_a_worker: bool = True) -> TeacherFolder | None:
    """The folder of the teacher that trainers hold; None if there is none, or it is only on a worker. Raises
    ValueError if it cannot be used."""
    teacher = config.train.teacher
    if teacher is None or teacher.model is None or (by_a_worker and not is_here(teacher.model)):
        return None
    return find_teacher(teacher.model)


def teacher_context(config: RunConfig) -> int | None:
    """Tokens of the longest sequence that the teacher is for; None if that is not known here."""
    found = find_here(config)
    return None if found is None else longest_context(read_model_config(found.source, SETTING))


def frozen_bytes(config: RunConfig, version: int) -> int:
    """Bytes of the models that all ranks together hold and do not train: the teacher and the reference of
    `train.loss.kl`. `version`: those of a version of the policy."""
    train, found = config.train, find_here(config)
    taught = 0
    if found is not None:
        dtype = read_dtype(read_model_config(found.source, SETTING))
        taught = (DTYPE_BYTES | {"float16": 2}).get(dtype, 4) * _count(found)
    # with an adapter, that of another version stands in
    is_start = train.teacher is not None and train.teacher.weights is not None
    versions = 0 if train.lora is not None else is_start + (train.loss.kl is not None)
    return taught + versions * version


def explain_teacher(config: RunConfig, policy: int) -> str:
    """What the teacher is and costs, in words. `policy`: number of the policy's parameters."""
    teacher, found = config.train.teacher, find_here(config)
    assert teacher is not None
    if teacher.url is not None:
        return (
            f"the server at {teacher.url}, which the filter stage asks for the log-probs of each batch; each "
            "step has one more forward pass through the policy"
        )
    parameters, about = policy, "version 0 of the policy"
    if teacher.model is not None:
        about = f"{teacher.model}, which is on a worker"
        if found is not None:
            shape, parameters = read_model_config(found.source, SETTING), _count(found)
            about = f"{teacher.model}: {shape.get('model_type')}, {parameters / 1e6:,.1f} million parameters "
            about += f"in {read_dtype(shape)}"
    elif config.train.lora is not None:
        about += ", which takes no memory beside the adapter"
    passes = "one more forward pass through it"
    if not teacher.is_loss:
        passes, parameters = f"{passes} and one through the policy", parameters + policy
    if teacher.model is not None and found is None:
        return f"{about}; each step has {passes}"
    # a forward pass is a third of a pass with its backward pass
    share = parameters / (policy * (4 if config.train.recompute else 3))
    return f"{about}; each step has {passes}, about {share:.0%} more computing"


def read_dtype(shape: Mapping[str, Any]) -> str:
    """The dtype in which a model is held, by its configuration."""
    own = shape.get("text_config") or {}
    names = (place.get(key) for place in (shape, own) for key in ("dtype", "torch_dtype"))
    return str(next(filter(None, names), "float32"))


def _count(teacher: TeacherFolder) -> int:
    with teacher.open() as (folder, _):
        return count_parameters(folder)


def _open_tokenizer(policy: str | None) -> Tokenizer:
    if policy is not None:
        return Tokenizer.from_str(read_bytes(join(policy, "tokenizer.json")).decode())
    # transformers is imported for it
    from sf_core.models.builtin import make_tokenizer

    return make_tokenizer().backend_tokenizer
