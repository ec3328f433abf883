"""Every setting of a run. The YAML file, config.json and the form in the Prefect UI are this one model.

Owns defaults, bounds and the sentences a wrong value gets. Reads no environment and starts nothing.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator


def _in_order(schema: dict[str, Any]) -> None:
    """Keep the UI form in the order written here; Prefect sorts fields alphabetically otherwise."""
    for position, field in enumerate(schema.get("properties", {}).values()):
        field.setdefault("position", position)


class Settings(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, json_schema_extra=_in_order
    )


def _is_reference(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", value):
        raise ValueError(f"expected package.module:name, got {value!r}")
    return value


Reference = Annotated[str, AfterValidator(_is_reference)]
"""Names Python code as package.module:name; it must be importable on the agent workers."""


class WarmstartConfig(Settings):
    """Supervised start of the built-in policy from generated demonstrations."""

    steps: int = Field(150, ge=0)
    """Optimiser steps; 0 leaves the policy untrained."""
    batch_size: int = Field(64, ge=1)
    """Demonstrations per step."""
    learning_rate: float = Field(3e-3, gt=0)
    """Peak learning rate; it falls to a tenth along a cosine."""


class PolicyConfig(Settings):
    """The model under training."""

    model: str | None = None
    """Folder of a Hugging Face causal LM to start from. Empty: the built-in small Qwen3 policy is made."""
    hidden_size: int = Field(128, ge=32, multiple_of=32)
    """Width of the built-in policy."""
    num_layers: int = Field(4, ge=1, le=64)
    """Layers of the built-in policy."""
    warmstart: WarmstartConfig | None = WarmstartConfig()
    """Supervised start of the built-in policy; not used with `model`."""


class EnvironmentConfig(Settings):
    """What the agent works on and how it is scored."""

    tasks: Reference = "sf_core.environments.quickstart:tasks"
    """Function (split, index) -> Task; split is "train" or "holdout"; equal arguments give equal tasks."""
    agent: Reference = "sf_core.environments.quickstart:agent"
    """Function (task, endpoint) -> answer, plain or async: the agent. It sees an ordinary LLM endpoint."""
    reward: Reference = "sf_core.environments.quickstart:reward"
    """Function (task, answer) -> number, or a mapping of named parts whose sum is the reward."""


class RolloutConfig(Settings):
    """How sessions are produced and when a batch is full."""

    group_size: int = Field(8, ge=2)
    """Sessions of one task whose rewards are compared."""
    groups_per_batch: int = Field(32, ge=1)
    """Groups per iteration."""
    gate: Literal["all", "varied"] = "all"
    """all: every complete group counts. varied: groups whose rewards are all equal are dropped and replaced
    (dynamic sampling, DAPO)."""
    overlap: bool = True
    """Sample for the next batch while this one is trained on. Off: strictly on-policy."""
    max_lag: int = Field(1, ge=0)
    """Most versions between the weights being updated and the weights that sampled a token."""
    on_max_lag: Literal["wait", "drop"] = "wait"
    """wait: a batch waits for sessions that would grow too old. drop: their groups are dropped, counted."""
    temperature: float = Field(1.0, ge=0, le=2)
    """Sampling temperature of training sessions; overrides what the agent asks for."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling of training sessions."""
    top_k: int = Field(0, ge=0)
    """Top-k sampling of training sessions; 0 means no limit."""
    max_tokens: int = Field(64, ge=1)
    """Most tokens per turn."""
    concurrency: int = Field(128, ge=1)
    """Sessions one agent worker runs at once."""
    session_timeout_s: float = Field(120.0, gt=0)
    """A session that runs longer, pauses not counted, counts as failed."""
    request_patience_s: float = Field(600.0, gt=0)
    """A request that no engine takes for this long, pauses counted, is refused (503); longer than a training
    step where no worker is left to rollout meanwhile."""
    session_attempts: int = Field(3, ge=1)
    """Tries before a failing session excludes its group."""
    batch_timeout_s: float = Field(1800.0, gt=0)
    """Longest wait for one batch; then the run fails and says what it waited for."""

    @property
    def lag_bound(self) -> int:
        return self.max_lag if self.overlap else 0


class TrainConfig(Settings):
    """The optimiser and the loss (GRPO; Shao et al. 2024, with DAPO's token mean and asymmetric clip)."""

    iterations: int = Field(40, ge=1)
    """RL iterations of the run."""
    learning_rate: float = Field(3e-4, gt=0)
    """Constant learning rate of AdamW, after `warmup_steps`."""
    warmup_steps: int = Field(0, ge=0)
    """Optimiser steps over which the learning rate rises from 0."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's averaging coefficients."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's weight decay."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this norm."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    """The importance ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(0.28, gt=0)
    """The importance ratio is clipped above at 1 + clip_high."""
    importance_cap: float = Field(5.0, ge=1)
    """Truncation of the importance ratio where it weighs the gradient (truncated importance sampling)."""
    minibatches: int = Field(1, ge=1)
    """Optimiser steps per batch; groups stay whole."""
    tokens_per_microbatch: int = Field(8192, ge=64)
    """Most tokens, padding included, in one forward and backward pass."""
    scale_rewards: bool = True
    """Divide advantages by the standard deviation of the group (GRPO); off: mean only (Dr. GRPO)."""
    checkpoint_every: int = Field(1, ge=1)
    """Iterations between checkpoints; lost ones are replayed from stored batches."""


class EvaluateConfig(Settings):
    """Held-out evaluation; its sessions never train."""

    every: int = Field(10, ge=1)
    """Iterations between evaluations; the first and the last policy are always evaluated."""
    num_tasks: int = Field(128, ge=1)
    """Held-out tasks."""


class EngineConfig(Settings):
    """What serves the policy on a rollout worker."""

    kind: Literal["torch", "scripted"] = "torch"
    """torch: the built-in engine. scripted: canned answers without a model, for tests and benchmarks."""
    max_running: int = Field(128, ge=1)
    """Requests in one decoding batch."""
    context_length: int = Field(512, ge=16)
    """Most tokens of one sequence, prompt included."""
    kv_on_update: Literal["recompute", "keep"] = "recompute"
    """What happens to the KV cache of running requests when weights change."""
    script: Reference | None = None
    """For the scripted engine: function (prompt_ids, seed) -> token ids."""


class WorkerConfig(Settings):
    """One local Dask worker process."""

    tags: tuple[str, ...]
    """Capability tags."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of the numerical libraries in this worker; by default one per core, at most 8. Workers may
    share cores: a thread that has nothing to do sleeps."""


class ClusterConfig(Settings):
    """Where the work runs."""

    scheduler: str | None = None
    """Address of a Dask scheduler whose workers carry tags as resources. Empty: local workers are started."""
    workers: dict[str, WorkerConfig] = {
        "r0": WorkerConfig(tags=("rollout",)),
        "t0": WorkerConfig(tags=("rollout", "train")),
        "a0": WorkerConfig(tags=("agent",)),
        "c0": WorkerConfig(tags=("cpu",)),
    }
    """Local workers by name; not used with `scheduler`."""
    stage_timeout_s: float = Field(7200.0, gt=0)
    """Longest wait for a stage to end, the wait for its worker included; then the run fails and says what it
    waited for. Longer than `rollout.batch_timeout_s` and than a training step."""


class DataplaneConfig(Settings):
    """The process that stands between agents and engines."""

    url: str | None = None
    """Address of a running `sf dataplane`. Empty: one is started on loopback. Its key is read from the
    environment variable SF_DATAPLANE_KEY."""


class StorageConfig(Settings):
    """Where run directories live."""

    root: str = "runs"
    """Folder or fsspec URL; a run's directory is root/run_id."""


class RunConfig(Settings):
    """One training run."""

    run_id: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    """Name of the run and of its directory. The same name continues where it stopped. Empty: a new one."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Decides the policy's initial weights, the order of tasks and every draw."""
    policy: PolicyConfig = PolicyConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    rollout: RolloutConfig = RolloutConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    engine: EngineConfig = EngineConfig()
    cluster: ClusterConfig = ClusterConfig()
    dataplane: DataplaneConfig = DataplaneConfig()
    storage: StorageConfig = StorageConfig()

    @model_validator(mode="after")
    def _check_across_fields(self) -> RunConfig:
        if self.rollout.max_tokens >= self.engine.context_length:
            raise ValueError(
                f"rollout.max_tokens ({self.rollout.max_tokens}) must be less than "
                f"engine.context_length ({self.engine.context_length})"
            )
        if self.train.minibatches > self.rollout.groups_per_batch:
            raise ValueError(
                f"train.minibatches ({self.train.minibatches}) must not exceed "
                f"rollout.groups_per_batch ({self.rollout.groups_per_batch})"
            )
        if self.engine.kind == "scripted" and self.engine.script is None:
            raise ValueError("engine.script is required with engine.kind: scripted")
        return self

    @property
    def run_dir(self) -> str:
        assert self.run_id is not None
        return f"{self.storage.root.rstrip('/')}/{self.run_id}"


class ConfigError(ValueError):
    """A configuration that cannot run; the message is one sentence for the user."""


def load_config(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Read a YAML file, apply `key.path=value` overrides (values are YAML), validate.

    Raises ConfigError with the path of the key and what is allowed.
    """
    try:
        data = yaml.safe_load(Path(path).read_text()) or {}
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; give the path of a YAML configuration") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a mapping of settings, got {type(data).__name__}")
    for override in overrides or []:
        _apply_override(data, override)
    return validate_config(data, source=str(path))


def validate_config(data: dict[str, Any], source: str = "config") -> RunConfig:
    """Validate a mapping; raises ConfigError with one sentence that names every wrong key."""
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{source}: {'; '.join(_sentence(e) for e in error.errors())}") from None


def _apply_override(data: dict[str, Any], override: str) -> None:
    path, sep, text = override.partition("=")
    if not sep or not path:
        raise ConfigError(f"--set {override}: expected key.path=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"--set {override}: {text!r} is not a valid YAML value") from None
    *parents, leaf = path.split(".")
    node = data
    for name in parents:
        child = node.get(name)
        if child is None:
            child = node[name] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"--set {override}: {name} is a value, not a section")
        node = child
    node[leaf] = value


def _sentence(error: Any) -> str:
    location = ".".join(str(part) for part in error["loc"])
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        return f"{location}: unknown key; allowed here: {', '.join(_fields_at(error['loc'][:-1]))}"
    if not location:
        return message
    message = message[0].lower() + message[1:]
    return f"{location}: {message}" + (
        "" if error["type"] in ("missing", "value_error") else f", got {error['input']!r}"
    )


def _fields_at(location: tuple[int | str, ...]) -> list[str]:
    node: Any = RunConfig()
    for name in location:
        node = getattr(node, str(name)) if isinstance(node, BaseModel) else node.get(name)
        if isinstance(node, dict):
            node = {**node, **{str(n): WorkerConfig(tags=()) for n in location[1:]}}
    return list(type(node).model_fields) if isinstance(node, BaseModel) else list(node or ())
