"""Checks of the models beside the policy: the judges and the teacher."""

from __future__ import annotations

import inspect
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from sf_core.agents.judges.judges import takes_judges
from sf_core.config import RunConfig
from sf_core.engines.registry import engine_kind
from sf_core.engines.vllm.server import check_cpu_build
from sf_core.environments.registry import group_reward_of, reward_of
from sf_core.models.context import longest_context
from sf_core.models.images.processor_config import read_image_processor
from sf_core.models.pretrained.needed_weights import (
    UnknownModelError,
    check_weights,
    find_missing_quantized_modules,
)
from sf_core.process.environment_variables import vllm_python
from sf_core.process.user_code import name_function
from sf_core.scheduling.cluster import workers_here
from sf_core.stages.preflight.facts import Facts, known
from sf_core.training.policy_folder import is_quantised, policy_folder, read_model_config
from sf_core.training.teacher_folder import SETTING, check_vocabulary, count_rows, read_tokenizer
from storage.tensors.weights import PICKLES, WEIGHT_FILES, has_weights, open_weights


def unasked_judges(config: RunConfig, facts: Facts) -> str | None:
    """Judges that no function asks, or a function that asks judges where there are none."""
    environment = config.environment
    found = (reward_of(environment), group_reward_of(environment))
    asking = [function for function in found if function is not None and takes_judges(function)]
    if environment.judges and not asking:
        return (
            "environment.judges: no function uses judges; give environment.reward or "
            "environment.group_reward a parameter `judges`, or leave environment.judges out"
        )
    for function in asking if not environment.judges else ():
        if inspect.signature(function).parameters["judges"].default is inspect.Parameter.empty:
            return (
                f"environment.judges: {name_function(function)} has a parameter `judges`, but no judges are "
                "configured; add them to environment.judges"
            )
    return None


def served_judges_fault(config: RunConfig, facts: Facts) -> str | None:
    """Judges that workers of this machine cannot serve."""
    served = config.environment.served_judges
    if not served or not known(facts.workers_are_here):
        return None
    for name, model in served.items():
        folder = policy_folder(model)
        setting = f"environment.judges.{name}.model"
        if fault := _find_fault(folder):
            return f"{setting}: {model} {fault}"
        if fault := describe_incomplete(folder, setting):
            return fault
    python = vllm_python()
    workers = workers_here(config).values()
    if any("reward" in worker.tags and worker.device == "cpu" for worker in workers):
        check_cpu_build(python)
    return None


def teacher_fault(config: RunConfig, facts: Facts) -> str | None:
    """A teacher that the trainer cannot hold, that is not there, or that is for shorter sequences."""
    if config.train.teacher is None:
        return None
    if (backend := config.train.backend or engine_kind(config).trainer) != "torch":
        return (
            f"train.teacher: only train.backend torch learns from a teacher, not {backend}; leave one of the "
            "two out"
        )
    if facts.teacher is None:
        return None
    positions = longest_context(read_model_config(facts.teacher.source, SETTING))
    context = config.engine.context_length
    if context is None and config.policy.model is None:
        context = config.engine.context
    if positions is None or context is None or context <= positions:
        return None
    return (
        f"engine.context_length is {context}, but the teacher of train.teacher supports at most "
        f"{positions} tokens: lower engine.context_length, or use a teacher with a longer context"
    )


def vocabulary_fault(config: RunConfig, facts: Facts) -> str | None:
    """A token of the policy that is another one to the teacher, or images that the teacher cannot read."""
    teacher = config.train.teacher
    known(facts.shape)
    if teacher is None:
        return None
    is_multimodal = (
        config.policy.sees if facts.folder is None else read_image_processor(facts.folder) is not None
    )
    if is_multimodal and teacher.url is not None:
        return (
            "train.teacher.url: a server receives token ids only, but the policy sees images: remove "
            f"the URL, and set {SETTING} to the folder of the teacher"
        )
    folder = None if facts.teacher is None else facts.teacher.source
    if is_multimodal and folder is not None and read_image_processor(folder) is None:
        return f"{SETTING}: {folder} does not see images, but the policy does: use a teacher that sees images"
    setting = SETTING
    if teacher.tokenizer is not None:
        folder = teacher.tokenizer
        setting = "train.teacher.tokenizer"
    if folder is not None:
        tokenizer, rows = _read_vocabulary(config, facts.folder)
        check_vocabulary(tokenizer, rows, folder, setting)
    return None


def _read_vocabulary(config: RunConfig, folder: str | None) -> tuple[Any, int]:
    """The tokenizer of the policy, and the number of its ids."""
    if folder is not None:
        tokenizer = read_tokenizer(folder, "policy.model")
        return tokenizer, count_rows(folder) or tokenizer.get_vocab_size()
    # transformers is imported for it
    from sf_core.models.builtin import make_tokenizer

    tokenizer = make_tokenizer(config.policy.sees).backend_tokenizer
    return tokenizer, tokenizer.get_vocab_size()


def describe_incomplete(folder: str, setting: str) -> str | None:
    """One sentence that names the setting, if weights that vLLM would serve are not all those of the model.
    They may be quantised, pickled, or of an architecture that only vLLM knows. Whether
    there is a model folder at all is told by who serves it."""
    if not Path(folder, "config.json").is_file():
        return None
    names = [path.name for path in Path(folder).iterdir()]
    safe = [name for name in names if fnmatch(name, WEIGHT_FILES[0])]
    if not safe:
        if not any(fnmatch(name, pattern) for name in names for pattern in PICKLES):
            return f"{setting}: {folder} contains no weights (*.safetensors)"
        return None
    # others name the one file otherwise, which vLLM reads all the same
    if not has_weights(folder):
        return None
    shape = read_model_config(folder, setting)
    try:
        if not is_quantised(folder, shape):
            check_weights(shape, folder, setting)
            return None
        stored = open_weights(folder)[0].entries
        lack = find_missing_quantized_modules(shape, stored)
    except UnknownModelError:
        return None
    except (ValueError, OSError) as error:
        return f"{setting}: {error}"
    return f"{setting}: {lack.tell(folder, stored)}" if lack else None


def _find_fault(folder: str) -> str | None:
    """Why vLLM would not serve conversations with the model in this folder; None if it would."""
    if not Path(folder, "config.json").is_file():
        return "is not a Hugging Face folder: config.json is missing"
    settings = Path(folder, "tokenizer_config.json")
    files = (Path(folder, name) for name in ("chat_template.jinja", "chat_template.json"))
    if any(map(Path.is_file, files)) or (
        settings.is_file() and '"chat_template"' in settings.read_text(encoding="utf-8")
    ):
        return None
    return "has no chat template, which judges need: add chat_template.jinja to the folder"
