"""What a policy takes of the memory of devices and of the storage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from sf_core.config import RunConfig
from sf_core.config.train_config import CHECKPOINT_BYTES, DEFAULT_PASS_TOKENS
from sf_core.engines.registry import engine_kind
from sf_core.models.context import DTYPE_BYTES, LEAN_TYPES, cache_bytes, count_builtin_parameters
from sf_core.models.images.processor_config import FEATURE_CACHE_BYTES, MULTIMODAL_MODEL_TYPES
from sf_core.stages.preflight.lora import TrainedAdapter
from sf_core.stages.preflight.resolve import (
    Resolved,
    derive_rates,
    explain_warm_start,
    first_prompts,
    resolve,
    values_of,
)
from sf_core.stages.preflight.start_folder import (
    adapter_to_start_from,
    folder_to_start_from,
    name_built_in_shape,
)
from sf_core.stages.preflight.teacher import explain_teacher, frozen_bytes
from sf_core.stages.retention import KEPT_EVERY, num_kept_weights
from sf_core.training.policy_folder import count_parameters, count_vision_tower, read_model_config

_TRAINED_BYTES = 16
"""For each parameter that is trained, in float32: weight, gradient and Adam's two moments."""

_HELD_BYTES = {"float32": 2.5, "bfloat16": 2.0}
"""For each parameter, on one rank: the weights that passes read. In float32 some of them are not copied."""

_LAYER_BYTES = 8
"""For each parameter of a layer while its gradient is made: its fused weights and their gradients."""

_HEAD_BYTES = {"float32": 4, "bfloat16": 6}
"""For each parameter of the head while its gradient is made."""

_TIED_BYTES = 12
"""For each parameter of a head that is the embedding too, while its two gradients are added."""

_PROCESSES_BYTES = 4_300_000_000
"""What all processes of a run take beside weights and what is made of them (benchmarks.real_model)."""

_TOO_FAST = 10
"""A learning rate of more than this many derived ones is warned of."""

_SMALL_WIDTH = 1024

SURE_PART = 0.7
"""Part of the estimate of activations that is certain: of Qwen3-8B it is a third above what was counted."""

_KEPT_WIDTHS = {"float32": (10.0, 4.6), "bfloat16": (16.0, 4.6)}
"""Elements that a layer keeps of each token for the backward pass, in hidden and in intermediate sizes. They
were counted for Llama and Qwen3 by `saved_tensors_hooks`, in rows of 100 tokens and with fused attention."""


@dataclass(frozen=True, slots=True)
class PolicySizes:
    """How many bytes a policy takes; what libraries take for themselves comes on top."""

    weights: int
    """What an engine serves: a version, or the policy with the version of an adapter of it."""
    version: int
    """A version as it is published."""
    cache: int
    """What an engine reserves for KV; 0 if it reserves nothing, or the model's shape is unknown."""
    rank: int
    """What each rank trains, with its gradient and moments, and the weights that stay: its part of these. One
    rank holds the weights of a step too, in the dtype of computing."""
    tower: int
    """What each rank holds of the vision tower of a multimodal policy; `rank` includes it."""
    features: int
    """What a rank keeps of the features of images, at most; 0 for a policy that does not see."""
    frozen: int
    """What each rank holds of the teacher and of the reference of `train.loss.kl`; `rank` includes it."""
    checkpoint: int
    parameters: int
    """Number of parameters of the policy."""
    width: int
    """The policy's hidden size; that of a small model if it is unknown."""
    activations: int
    """What a rank keeps of a micro-batch for the backward pass, about; 0 if the model's shape is unknown."""
    head: int
    """What the gradient of the head takes while a rank makes it, beside the activations."""
    largest: int
    """What the gradients of the largest module take while a rank makes them, without activations."""
    adapter: TrainedAdapter | None
    """What is trained, if it is not all weights."""
    derived: dict[str, Resolved]
    """Settings that are left open, as far as this machine can tell: another one may make version 0."""
    config: RunConfig
    """The settings with those values."""

    @classmethod
    def of(cls, config: RunConfig, *, by_a_worker: bool = True) -> PolicySizes | None:
        """None if the policy or its adapter is only on a worker, or nothing is computed. Raises ValueError if
        they cannot be used. `by_a_worker`: their folders may exist only on a worker."""
        if not engine_kind(config).runs_policy:
            return None
        policy = config.policy
        folder = None
        tower = 0
        if policy.model is None:
            parameters = count_builtin_parameters(policy.hidden_size, policy.num_layers)
            shape = name_built_in_shape(config)
        elif (folder := folder_to_start_from(config, by_a_worker)) is not None:
            parameters = count_parameters(folder)
            shape = read_model_config(folder)
            tower = count_vision_tower(folder) if shape.get("model_type") in MULTIMODAL_MODEL_TYPES else 0
        else:
            return None
        adapter = None
        if config.train.lora is not None:
            adapter = adapter_to_start_from(config, shape, by_a_worker)
            if adapter is None:
                return None
        derived = resolve(config, parameters, folder, first_prompts(config), adapter)
        config = config.fill(values_of(derived))
        policy = config.policy
        engine = config.engine
        networks = 1 if config.train.critic is None else 2
        cache = None
        if engine_kind(config).reserves_cache:
            cache = cache_bytes(shape, engine.max_running, engine.context, policy.dtype_name)
        itemsize = DTYPE_BYTES[policy.dtype_name]
        trained = adapter.parameters if adapter else parameters
        rank = _rank_bytes(trained, config) * networks
        kept = 0
        holds = _holds_weights(shape, config)
        if holds:
            rank += int(parameters * _HELD_BYTES[policy.dtype_name])
        if adapter is not None:
            kept = parameters * itemsize
            rank += -(-kept // config.train.workers)
        train = config.train
        shared_by = train.ranks_per_policy if train.backend == "megatron" else train.workers
        frozen = -(-frozen_bytes(config, parameters * itemsize) // shared_by)
        head, largest = _gradient_bytes(shape, parameters, policy.dtype_name) if holds else (0, 0)
        return cls(
            weights=kept + (trained + tower) * itemsize,
            version=trained * itemsize,
            cache=cache or 0,
            rank=rank + frozen + tower * itemsize,
            tower=tower * itemsize,
            features=_feature_bytes(shape, config),
            frozen=frozen,
            checkpoint=trained * CHECKPOINT_BYTES * networks,
            parameters=parameters,
            width=_width(shape) or _SMALL_WIDTH,
            activations=_activation_bytes(shape, parameters, trained, holds, config),
            head=head,
            largest=largest,
            adapter=adapter,
            derived=derived,
            config=config,
        )

    def peak(self, sure_part: float = 1.0) -> int:
        """The most that a rank takes in a step, if this part of the activations is kept."""
        return self.rank + max(int(sure_part * self.activations) + self.head, self.largest)

    @property
    def held(self) -> str:
        """What a rank holds, in words."""
        held = "weights, gradient and Adam's moments"
        if self.adapter is not None:
            held = "the policy's weights, and the factors, their gradient and Adam's moments"
        beside = [
            *[f"{gb(self.tower)} of the vision tower"] * (self.tower > 0),
            *[f"{gb(self.frozen)} of models that are not trained"] * (self.frozen > 0),
        ]
        return f"{held}, with {' and '.join(beside)}" if beside else held


def _holds_weights(shape: Mapping[str, Any], config: RunConfig) -> bool:
    """Whether one rank holds all weights of the policy ready for the passes of a step."""
    train = config.train
    is_lean = shape.get("model_type") in (*LEAN_TYPES, *MULTIMODAL_MODEL_TYPES)
    return train.backend != "megatron" and train.workers == 1 and train.lora is None and is_lean


def _rank_bytes(parameters: int, config: RunConfig) -> int:
    train = config.train
    if train.backend != "megatron":
        return -(-parameters * _TRAINED_BYTES // train.workers)
    # ranks of different data have the same weights and a whole gradient, and share the rest
    weights = DTYPE_BYTES[config.policy.dtype_name]
    gradient = 4
    shared = CHECKPOINT_BYTES - (4 if weights == 4 else 0)
    return parameters * (weights + gradient) // train.ranks_per_policy + parameters * shared // train.workers


def _gradient_bytes(shape: Mapping[str, Any], parameters: int, dtype: str) -> tuple[int, int]:
    """What the gradients of the head take while a rank makes them, and those of the largest module."""
    shape = shape.get("text_config") or shape
    head = int(shape.get("vocab_size", 0)) * int(shape.get("hidden_size", 0))
    is_tied = bool(shape.get("tie_word_embeddings"))
    of_vocabulary = head if is_tied else 2 * head
    layer = max(0, parameters - of_vocabulary) // int(shape.get("num_hidden_layers") or 1)
    tied_bytes = _TIED_BYTES * head if is_tied else 0
    return head * _HEAD_BYTES[dtype], max(_LAYER_BYTES * layer, tied_bytes)


def _activation_bytes(
    shape: Mapping[str, Any], parameters: int, trained: int, is_held: bool, config: RunConfig
) -> int:
    shape = shape.get("text_config") or shape
    try:
        hidden, inner, layers = (
            int(shape[name]) for name in ("hidden_size", "intermediate_size", "num_hidden_layers")
        )
    except (KeyError, TypeError, ValueError):
        return 0
    train = config.train
    itemsize = DTYPE_BYTES[config.policy.dtype_name]
    of_hidden, of_inner = _KEPT_WIDTHS[config.policy.dtype_name]
    of_layer = of_hidden * hidden + of_inner * inner
    # recomputed, a layer keeps its input alone, and one layer at a time the rest
    kept = layers * hidden + of_layer if train.recompute else layers * of_layer
    # the projections with the weights of the norms multiplied into them, or factors, rounded and fused
    fused = parameters // (layers if train.recompute else 1)
    if train.workers == 1 and train.lora is not None:
        fused = 2 * trained
    elif is_held:
        # they are counted with what stays for a step
        fused = 0
    batch = _batch_tokens(config)
    tokens = min(train.pass_tokens, batch)
    return int((tokens * kept + fused) * itemsize) // train.ranks_per_policy


def _width(shape: Mapping[str, Any]) -> int:
    return int((shape.get("text_config") or shape).get("hidden_size", 0))


def _batch_tokens(config: RunConfig) -> int:
    rollout = config.rollout
    return rollout.groups_per_batch * rollout.group_size * config.engine.context


def _feature_bytes(shape: Mapping[str, Any], config: RunConfig) -> int:
    if shape.get("model_type") not in MULTIMODAL_MODEL_TYPES:
        return 0
    return min(
        FEATURE_CACHE_BYTES, _batch_tokens(config) * _width(shape) * DTYPE_BYTES[config.policy.dtype_name]
    )


def bytes_of_two_workers(sizes: PolicySizes | None) -> int:
    """Memory that all processes of a run take, about, if one worker samples and another one trains on the
    CPUs of a machine; 0 if the size of the policy is unknown."""
    if sizes is None:
        return 0
    return _PROCESSES_BYTES + sizes.weights + sizes.cache + sizes.peak()


def warn_of_rates(config: RunConfig, sizes: PolicySizes | None) -> list[str]:
    """A sentence for each learning rate that is far above the derived one; nothing if the size of the policy
    is unknown."""
    derived = {} if sizes is None else derive_rates(config, sizes.parameters)
    warnings = []
    for name, (rate, why) in derived.items():
        given = attrgetter(name)(config)
        if given is not None and given > _TOO_FAST * rate:
            warnings.append(
                f"{name} {given:g} is {given / rate:,.0f} times the value that would be derived, {rate:g} "
                f"({why}), and may ruin the policy: leave {name} out, or lower it"
            )
    return warnings


def explain_sizes(config: RunConfig, sizes: PolicySizes | None) -> dict[str, str]:
    """What `sf plan` says of derived settings, memory and storage, by subject; nothing if it is unknown.
    `sizes` are those of the configuration."""
    if sizes is None:
        return _explain_derived(config, resolve(config))
    train = sizes.config.train
    ranks = "the trainer" if train.workers == 1 else f"each of {train.workers} trainers"
    cache = f" and {gb(sizes.cache)} of KV cache" if sizes.cache else ""
    often = "each iteration" if train.interval == 1 else f"every {train.interval} iterations"
    for_good = f", and those of every {train.keep_every} iterations" if train.keep_every else ""
    peak = (
        f", and about {gb(sizes.peak() - sizes.rank)} of activations and intermediate gradients: "
        f"{gb(sizes.peak())} at most"
    )
    activations = peak + _explain_long_rows(sizes) if sizes.activations else ""
    features = f", and at most {gb(sizes.features)} for features of images" if sizes.features else ""
    written = "an adapter" if sizes.adapter else "weights"
    warm = explain_warm_start(config, train.rate)
    return {
        **({"warm start": warm} if warm else {}),
        **_explain_derived(config, sizes.derived),
        **({} if sizes.adapter is None else {"adapter": sizes.adapter.explain()}),
        **({} if train.teacher is None else {"teacher": explain_teacher(sizes.config, sizes.parameters)}),
        "memory": f"engines: {gb(sizes.weights)} of weights{cache}; "
        f"{ranks}: {gb(sizes.rank)} of {sizes.held}{activations}{features}",
        "storage": f"each iteration writes {gb(sizes.version)} of {written}, {_explain_kept(sizes)}; "
        f"a checkpoint, {often}, {gb(sizes.checkpoint)}, of which the newest {train.keep_checkpoints} "
        f"stay{for_good}",
        "disk": (
            f"about {gb(disk_bytes(sizes))} of weights and checkpoints after {train.iterations} "
            "iterations; trajectories need additional space"
        ),
    }


def _explain_long_rows(sizes: PolicySizes) -> str:
    """What passes over the longest rows take, if the maximum of a pass grows with them."""
    longest = 2 * sizes.config.engine.context
    if sizes.config.train.tokens_per_microbatch is not None or longest <= DEFAULT_PASS_TOKENS:
        return ""
    most = sizes.activations * longest // DEFAULT_PASS_TOKENS
    return f", but up to {gb(most)} of activations if rows are as long as engine.context_length"


def _explain_derived(config: RunConfig, derived: dict[str, Resolved]) -> dict[str, str]:
    """Values and reasons, without those that every run with the built-in policy has."""
    of_all = {} if config.policy.model else resolve(config)
    return {
        key: f"{value:g}: {reason}" if isinstance(value, float) else f"{value}: {reason}"
        for key, (value, reason) in derived.items()
        # those are in what is said of the adapter
        if key not in of_all and not key.startswith("train.lora.")
    }


def gb(num_bytes: int) -> str:
    """The number in words, with three digits or so."""
    if num_bytes < 1e6:
        return f"{num_bytes / 1e3:,.0f} kB"
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.0f} MB"


def _explain_kept(sizes: PolicySizes) -> str:
    """Which versions stay, in words."""
    newest = num_kept_weights(sizes.config.train, sizes.version)
    if newest is None:
        return "which all stay"
    return f"of which the newest {newest}, every {KEPT_EVERY}th and all evaluated versions stay"


def disk_bytes(sizes: PolicySizes) -> int:
    """What weights and checkpoints take at the end, with the start folder and the exported policy."""
    train = sizes.config.train
    last = sizes.config.train.iterations
    keep = num_kept_weights(train, sizes.version) or last
    often = (KEPT_EVERY, sizes.config.evaluate.every)

    def stays(version: int) -> bool:
        # one that is being published is beside the newest
        return version >= last - keep or any(version % every == 0 for every in often)

    versions = sum(map(stays, range(1, last + 1)))
    for_good = last // train.keep_every if train.keep_every else 0
    checkpoints = min(train.keep_checkpoints + for_good, -(-last // train.interval))
    return versions * sizes.version + 2 * sizes.weights + checkpoints * sizes.checkpoint
