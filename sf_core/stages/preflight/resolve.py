"""Resolves the settings that are left open by the policy, the first prompts and the device, with reasons.

What follows from the other settings is stored in config.json. The rest is stored in the manifest of the start
stage, because only the worker that makes version 0 may have the model. A run that resumes on other hardware
keeps both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from sf_core.config import RunConfig, WarmstartConfig
from sf_core.config.programs import Command
from sf_core.config.train_config import CHECKPOINT_BYTES, interval_for, rate_for, rate_of_built_in
from sf_core.environments.registry import draw_tasks
from sf_core.models.context import longest_context
from sf_core.models.pretrained.apart import call_in_subprocess
from sf_core.stages.preflight.lora import TrainedAdapter
from sf_core.stages.preflight.teacher import teacher_context
from sf_core.training.policy_folder import read_model_config
from storage.run_directory import RunDirectory

NUM_PROMPTS = 64

_MODEL_TOKENS = 256
"""`rollout.max_tokens` of a model."""

_ANSWERS = 4
"""Number of answers that the context has room for, besides the prompt."""

_ASSUMED_PROMPT = 3072
"""Tokens of a prompt that is not known before agents run."""

_RATE = 5
"""Learning rate of the warm start, in those of reinforcement learning."""


class Resolved(NamedTuple):
    value: Any
    reason: str


def resolve(
    config: RunConfig,
    parameters: int | None = None,
    folder: str | None = None,
    prompts: Sequence[str] = (),
    adapter: TrainedAdapter | None = None,
) -> dict[str, Resolved]:
    """Values of the settings that are left open, by their keys. Without `parameters` only those that follow
    from other settings; with them, with the folder of a model, and with the adapter if one is trained, all.
    Raises ValueError if an answer would not fit into the model."""
    found = _by_settings(config)
    if parameters is not None:
        found = _by_policy(config.fill(values_of(found)), parameters, folder, prompts, adapter) | found
    return {key: derived for key, derived in found.items() if config.leaves_open(key)}


def values_of(derived: Mapping[str, Resolved]) -> dict[str, Any]:
    return {key: value for key, (value, _) in derived.items()}


def warm_rate(warm: WarmstartConfig, rate: float) -> float:
    """Learning rate of the warm start of a model, by that of reinforcement learning."""
    return _RATE * rate if warm.learning_rate is None else warm.learning_rate


def explain_warm_start(config: RunConfig, rate: float) -> str | None:
    """What the policy is shown before the first iteration, in words."""
    warm = config.policy.warmstart
    steps = config.policy.warm_steps
    if warm is None or not steps:
        return None
    shown = warm.demonstrations or f"the environment {config.environment.name}"
    at = ""
    if config.policy.model is not None:
        at = f", learning rate {warm_rate(warm, rate):g}"
    return f"{steps} steps of {warm.batch_size} demonstrations, of {shown}{at}"


def derive_rates(config: RunConfig, parameters: int) -> dict[str, Resolved]:
    """Learning rates for a policy of this size, by their settings, whether these are left open or not."""
    rate, why = _rate(config, parameters)
    found = {"train.learning_rate": Resolved(rate, why)}
    if config.policy.model is not None and config.policy.warm_steps:
        found["policy.warmstart.learning_rate"] = Resolved(_RATE * rate, why)
    return found


def first_prompts(config: RunConfig) -> list[str]:
    """Prompts of the first training tasks, if the context of a model is to be derived from them. Empty if
    agents are commands or outside: what they send is not known before they run."""
    is_known = not (config.rollout.is_external or isinstance(config.environment.agent, Command))
    if config.policy.model is None or not is_known or not config.leaves_open("engine.context_length"):
        return []
    return [str(task.prompt) for task in draw_tasks(config.environment, "train", range(NUM_PROMPTS))]


def read_with_derived(directory: RunDirectory) -> RunConfig:
    """The stored configuration, and the values that were derived where the run began. Raises ValueError if
    there is no run."""
    config = directory.read_config(RunConfig)
    start = directory.read_manifest(None, "start")
    return config if start is None else config.fill(start.data.get("derived", {}))


def _by_settings(config: RunConfig) -> dict[str, Resolved]:
    if config.policy.model is None:
        why = "the built-in policy"
        found = {
            "rollout.max_tokens": Resolved(config.rollout.turn_tokens, why),
            "engine.context_length": Resolved(config.engine.context, why),
            "train.checkpoint_every": Resolved(config.train.interval, why),
        }
        # auto asks for the device
        return found | ({} if config.policy.dtype else {"policy.dtype": Resolved("float32", why)})
    room = config.engine.context_length
    if room is not None and room // 2 < _MODEL_TOKENS:
        return {"rollout.max_tokens": Resolved(room // 2, f"half of engine.context_length {room}")}
    return {"rollout.max_tokens": Resolved(_MODEL_TOKENS, "policy.model is set")}


def _by_policy(
    config: RunConfig,
    parameters: int,
    folder: str | None,
    prompts: Sequence[str],
    adapter: TrainedAdapter | None,
) -> dict[str, Resolved]:
    trained = f"{parameters:,} parameters"
    num_trained = parameters
    found: dict[str, Resolved] = {}
    if adapter is not None:
        num_trained = adapter.parameters
        trained = f"{num_trained:,} parameters that are trained"
        found = _by_adapter(adapter)
    found["train.learning_rate"] = _rate(config, parameters)
    found["train.checkpoint_every"] = Resolved(
        interval_for(num_trained), f"{trained} of {CHECKPOINT_BYTES} bytes in a checkpoint"
    )
    if folder is not None and config.leaves_open("engine.context_length"):
        most = [longest_context(read_model_config(folder)), teacher_context(config)]
        found["engine.context_length"] = _context(
            config.rollout.turn_tokens, folder, prompts, min((own for own in most if own), default=None)
        )
    # torch is imported for it
    return found | ({"policy.dtype": _dtype()} if config.leaves_open("policy.dtype") else {})


def _rate(config: RunConfig, parameters: int) -> Resolved:
    """The learning rate for a policy of this size."""
    rate_of: Callable[..., float] = rate_for
    why = f"{parameters:,} parameters, 2e-5 x sqrt(135M / N)"
    if config.policy.model is None:
        rate_of = rate_of_built_in
        why = f"the built-in policy, {parameters:,} parameters"
    of_all = rate_of(parameters)
    if config.train.lora is None:
        return Resolved(of_all, why)
    rate = rate_of(parameters, is_adapter=True)
    return Resolved(rate, f"{rate / of_all:.0f} times that of training all weights ({why})")


def _by_adapter(trained: TrainedAdapter) -> dict[str, Resolved]:
    why = "by default" if trained.source is None else f"that of {trained.source}"
    values = {"rank": trained.adapter.rank, "alpha": trained.adapter.alpha}
    return {f"train.lora.{name}": Resolved(value, why) for name, value in values.items()}


def _context(tokens: int, folder: str, prompts: Sequence[str], most: int | None) -> Resolved:
    """The context length for answers of up to `tokens` tokens. `most`: tokens that policy and teacher are
    for."""
    # tokenizers and templates, which most processes that read a configuration do not use
    from sf_core.dataplane.chat.renderer import open_renderer

    renderer = open_renderer(folder)
    lengths = [
        len(renderer.encode(renderer.render([{"role": "user", "content": one}], []))) for one in prompts
    ]
    longest = max(lengths, default=_ASSUMED_PROMPT)
    wanted = longest + _ANSWERS * tokens
    prompt = (
        f"the longest of the first {len(lengths)} prompts has {longest:,} tokens"
        if lengths
        else f"a prompt of {longest:,} tokens is assumed, as agents have not run yet"
    )
    why = f"{prompt}, {_ANSWERS} answers of rollout.max_tokens {tokens} follow"
    if most is None or wanted <= most:
        return Resolved(wanted, why)
    if tokens >= most:
        raise ValueError(
            f"rollout.max_tokens ({tokens}) must be less than the {most} tokens that the model supports"
        )
    return Resolved(most, f"the longest context of the model; {why}")


def _dtype() -> Resolved:
    dtype: str = call_in_subprocess(_fastest_dtype)
    if dtype == "bfloat16":
        return Resolved(dtype, "the device has instructions for it")
    return Resolved(dtype, "the CPU has no instructions for bfloat16")


def _fastest_dtype() -> str:
    from sf_core.models.projections import fastest_dtype

    return fastest_dtype()
