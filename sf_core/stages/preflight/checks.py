"""The checks before a run: one list. Every command and every flow runs it, as far as the facts are known."""

from __future__ import annotations

import shutil
from importlib.util import find_spec

from sf_core.config import RunConfig
from sf_core.config.pipelines import PIPELINES
from sf_core.config.programs import Command
from sf_core.config.rollout_config import BUILT_IN_CONTEXT
from sf_core.dataplane.chat.renderer import open_renderer
from sf_core.engines.registry import engine_kind
from sf_core.environments.registry import (
    agent_of,
    check_host,
    environment_of,
    group_reward_of,
    prepare_of,
    reward_of,
    tasks_of,
)
from sf_core.models.context import check_context
from sf_core.models.images.processor_config import MULTIMODAL_MODEL_TYPES, read_image_processor
from sf_core.process.environment_variables import (
    CACHE_DIR,
    PREFECT_HOME,
    cache_dir,
    check_place,
    prefect_api_url,
    prefect_home,
    vllm_python,
)
from sf_core.process.limits import check_open_files
from sf_core.reports.view import RunView
from sf_core.stages.preflight.facts import Check, Facts, UnknownFactError, known
from sf_core.stages.preflight.first_tasks import curriculum_fault, predict_warnings, tasks_fault
from sf_core.stages.preflight.idle import describe_unreached, idle_setting
from sf_core.stages.preflight.other_models import (
    served_judges_fault,
    teacher_fault,
    unasked_judges,
    vocabulary_fault,
)
from sf_core.stages.preflight.sizes import SURE_PART, PolicySizes, disk_bytes, gb, warn_of_rates
from sf_core.stages.preflight.start_folder import warms_model
from sf_core.training.backends import check_installed, trainer_kind
from sf_core.training.demonstrations import check_demonstrations, demonstrations, encode
from sf_core.training.teacher_folder import check_version
from storage.files import absolute, folder_bytes, is_local
from storage.run_directory import RunDirectory

_WRITTEN = ("start", "weights", "checkpoints", "policy")
"""Folders of a run directory that the estimate of the disk counts."""


def preflight(facts: Facts) -> None:
    """Raises ValueError or OSError, one sentence, if a check finds something wrong. A check that has passed
    is not repeated; one that lacked a fact runs once the fact is known."""
    for check in CHECKS:
        if check in facts.passed:
            continue
        try:
            fault = check(facts.config, facts)
        except UnknownFactError:
            continue
        if fault:
            raise ValueError(fault)
        facts.passed.add(check)


def list_warnings(facts: Facts) -> list[str]:
    """What a user should know before the run begins, although nothing forbids it, as sentences."""
    return [*predict_warnings(facts.config), *warn_of_rates(facts.config, facts.sizes)]


def environment_fault(config: RunConfig, facts: Facts) -> str | None:
    for function_of in (environment_of, tasks_of, reward_of, group_reward_of, prepare_of):
        function_of(config.environment)
    return None


def agent_fault(config: RunConfig, facts: Facts) -> str | None:
    # a program need not be here if the workers are elsewhere
    if known(facts.workers_are_here) or not isinstance(config.environment.agent, Command):
        agent_of(config.environment)
    return None


def sandbox_fault(config: RunConfig, facts: Facts) -> str | None:
    if known(facts.workers_are_here):
        check_host(config.environment)
    return None


def lora_fault(config: RunConfig, facts: Facts) -> str | None:
    """Other settings that do not go with `train.lora`, or with its absence."""
    train = config.train
    engine = config.engine
    if train.lora is None:
        if config.policy.adapter is None:
            return None
        return (
            "policy.adapter needs `train.lora`: add `lora: {}` to the section train, or leave "
            "policy.adapter out"
        )
    if (backend := train.backend or engine_kind(config).trainer) != "torch":
        return (
            f"train.lora: only train.backend torch trains an adapter, not {backend}; leave one of the two out"
        )
    if train.critic is not None:
        return (
            "train.lora trains only the adapter's factors, but train.critic is a whole network: leave one "
            "of the two out"
        )
    if engine.kind == "vllm" and engine.kv_on_update == "keep":
        return (
            "engine.kv_on_update: keep cannot be combined with train.lora and engine.kind: vllm, which "
            "keeps a separate KV cache per adapter version: leave engine.kv_on_update out"
        )
    if engine.kind == "vllm" and PIPELINES[config.pipeline].lent:
        return (
            f"pipeline {config.pipeline} lends trainers to rollout, but with train.lora a trainer cannot "
            "be lent to engine.kind vllm: use pipeline async, or engine.kind torch"
        )
    return None


def stored_weights_fault(config: RunConfig, facts: Facts) -> str | None:
    """Incomplete weights from which a run goes on: version 0, the newest version and the reference of
    `train.loss.kl`."""
    if not (trainer_kind(config).computes_weights and facts.has_started):
        return None
    run = RunDirectory(config.run_dir)
    newest = RunView(run).progress().published
    for version in sorted({0, newest, config.train.loss.reference_of(newest)}):
        check_version(run, version, "restore the file from a copy")
    return None


def demonstrations_fault(config: RunConfig, facts: Facts) -> str | None:
    if not facts.has_started:
        check_demonstrations(config)
    return None


def context_fault(config: RunConfig, facts: Facts) -> str | None:
    length = config.engine.context_length
    if length is None or not engine_kind(config).runs_policy:
        return None
    if config.policy.model is not None:
        check_context(known(facts.shape), length)
    elif length > BUILT_IN_CONTEXT:
        return (
            f"engine.context_length ({length}) must not exceed the {BUILT_IN_CONTEXT} positions of the "
            "built-in policy"
        )
    return None


def warm_start_fault(config: RunConfig, facts: Facts) -> str | None:
    """A first demonstration that the chat template of the model does not render."""
    if warms_model(config):
        for shown in demonstrations(config, range(1))[0][:1]:
            encode(open_renderer(known(facts.folder)), shown)
    return None


def images_fault(config: RunConfig, facts: Facts) -> str | None:
    """A policy that reads images on an engine that shows none, or settings for images without such a
    policy."""
    kind = str(known(facts.shape).get("model_type"))
    most = config.rollout.max_picture_tokens
    if config.policy.sees and config.policy.model is not None:
        return "policy.sees applies only to the built-in policy: leave policy.sees out with policy.model"
    if kind in MULTIMODAL_MODEL_TYPES and not engine_kind(config).supports_images:
        return (
            f"engine.kind {config.engine.kind} does not support images, but the policy, a {kind}, sees "
            "images: use engine.kind vllm"
        )
    if kind not in MULTIMODAL_MODEL_TYPES and most is not None:
        return (
            f"rollout.max_picture_tokens ({most}) applies only to policies that see images, but this "
            f"policy, a {kind}, does not see images: leave rollout.max_picture_tokens out"
        )
    if facts.folder is not None and (image_processor := read_image_processor(facts.folder)) is not None:
        image_processor.with_max_tokens(most)
    return None


def backend_fault(config: RunConfig, facts: Facts) -> str | None:
    trainer_kind(config)
    return None


def trainer_fault(config: RunConfig, facts: Facts) -> str | None:
    trainer_kind(config).check_shape(known(facts.shape), config.train)
    return None


def engine_fault(config: RunConfig, facts: Facts) -> str | None:
    if known(facts.workers_are_here):
        engine_kind(config).check_shape(known(facts.shape))
    return None


def peft_fault(config: RunConfig, facts: Facts) -> str | None:
    """An adapter that only PEFT could train, where this Python does not have PEFT."""
    if config.train.lora is None or not known(facts.workers_are_here):
        return None
    # transformers is imported for it
    from transformers import AutoConfig

    from sf_core.models.decoder import decoder_spec
    from sf_core.models.language import language_model

    shape = known(facts.shape)
    _, model_config = language_model(AutoConfig.for_model(**shape))
    if find_spec("peft") is not None or decoder_spec(model_config, 1) is not None:
        return None
    return (
        f"train.lora with a model of model_type {shape['model_type']} needs PEFT, which this Python does "
        "not have: it comes with the extra [lora] of seamlessflow"
    )


def unreached_weights(config: RunConfig, facts: Facts) -> str | None:
    return None if facts.has_started else describe_unreached(config, known(facts.shape))


def adapter_fault(config: RunConfig, facts: Facts) -> str | None:
    """Gathering the adapter refuses one that cannot be trained."""
    known(facts.adapter)
    return None


def machine_fault(config: RunConfig, facts: Facts) -> str | None:
    """Limits and folders of this machine that do not allow the processes of the run."""
    if not facts.starts_services:
        return None
    check_open_files()
    if prefect_api_url() is None:
        check_place(prefect_home(), *PREFECT_HOME)
    if facts.workers_are_here:
        if config.policy.model is None:
            check_place(cache_dir(), *CACHE_DIR)
        if config.engine.kind == "vllm":
            vllm_python()
        check_installed(config)
    return None


def memory_fault(config: RunConfig, facts: Facts) -> str | None:
    """A worker with less memory than its engine, or its part of the training, takes."""
    sizes = known(facts.sizes)
    engine = sizes.config.engine
    train = sizes.config.train
    for worker in known(facts.workers):
        if worker.memory is None:
            continue
        has = f"worker {worker.name} has {gb(worker.memory)} of memory"
        if "rollout" in worker.tags and sizes.weights + sizes.cache > worker.memory:
            return (
                f"{has}, but its engine needs {gb(sizes.weights)} for the policy's weights and "
                f"{gb(sizes.cache)} for the KV cache of {engine.max_running} requests (engine.max_running) "
                f"of {engine.context} tokens (engine.context_length): lower engine.max_running or "
                "engine.context_length"
            )
        if "train" not in worker.tags:
            continue
        needs = f"{has}, but each of {train.workers} ranks needs {gb(sizes.rank)} for {sizes.held}"
        if sizes.rank > worker.memory:
            return f"{needs}: raise train.workers, or give the tag train to larger workers"
        if sizes.peak(SURE_PART) > worker.memory:
            recompute = "" if train.recompute else "set train.recompute to true, or "
            return (
                f"{needs}, and about {gb(sizes.peak() - sizes.rank)} for activations and intermediate "
                f"gradients with train.recompute {str(train.recompute).lower()}: {recompute}lower "
                f"train.tokens_per_microbatch ({train.pass_tokens})"
            )
    return None


def disk_fault(config: RunConfig, facts: Facts) -> str | None:
    return describe_lack_of_disk(config, known(facts.sizes)) if facts.writes else None


def describe_lack_of_disk(config: RunConfig, sizes: PolicySizes) -> str | None:
    """What the disk of `storage.root` lacks for the weights and checkpoints that are still to be written, as
    one sentence. None if it has room, or the room cannot be measured, as in an object store."""
    root = config.storage.root
    if not is_local(root):
        return None
    try:
        free = shutil.disk_usage(absolute(root)).free
    except OSError:
        return None
    written = 0
    if config.run_id is not None:
        run = RunDirectory(config.run_dir)
        written = sum(folder_bytes(run.path(part)) for part in _WRITTEN)
    needed = disk_bytes(sizes) - written
    if needed <= free:
        return None
    more = " more" if written else ""
    return (
        f"the disk of storage.root {absolute(root)} has {gb(free)} free, but the run needs about "
        f"{gb(needed)}{more} for weights and checkpoints: free space, set storage.root to a folder "
        "on another disk, or lower train.keep_checkpoints, train.keep_weights or train.iterations"
    )


CHECKS: tuple[Check, ...] = (
    environment_fault,
    agent_fault,
    sandbox_fault,
    curriculum_fault,
    idle_setting,
    lora_fault,
    unasked_judges,
    served_judges_fault,
    teacher_fault,
    backend_fault,
    stored_weights_fault,
    demonstrations_fault,
    context_fault,
    warm_start_fault,
    vocabulary_fault,
    images_fault,
    trainer_fault,
    engine_fault,
    peft_fault,
    unreached_weights,
    adapter_fault,
    tasks_fault,
    machine_fault,
    memory_fault,
    disk_fault,
)
"""In this order: where several are wrong, the first sentence is said."""
