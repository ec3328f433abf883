"""Every setting of a run. The YAML file, config.json and the form in the Prefect UI are this one model.

Owns defaults and bounds. Reads no environment and starts nothing.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from sf_core.config.addresses import without_user
from sf_core.config.base import Settings
from sf_core.config.devices import known_device
from sf_core.config.failures import FailureRules
from sf_core.config.pipelines import PIPELINES, PipelineName
from sf_core.config.undone import UndoneField
from sf_core.config.words import shown
from sf_core.models.context import BUILT_IN_CONTEXT
from sf_core.scheduling.tags import is_word


def _is_reference(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", value):
        raise ValueError(f"expected package.module:name, got {shown(value)}")
    return value


Reference = Annotated[str, AfterValidator(_is_reference)]
"""Names Python code as package.module:name; it must be importable on the agent workers."""

PublicAddress = Annotated[str, AfterValidator(without_user)]
"""A URL that anybody may read who may read the run."""

Share = Annotated[float, Field(ge=0, lt=1)]


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

    group_size: int = Field(8, ge=2, le=2**16)
    """Sessions of one task whose rewards are compared."""
    groups_per_batch: int = Field(32, ge=1, le=2**16)
    """Groups per iteration."""
    gate: Literal["all", "varied"] = "all"
    """all: every complete group counts. varied: groups whose rewards are all equal are dropped and replaced
    (dynamic sampling, DAPO)."""
    overlap: bool | None = None
    """Sample for the next batch while this one is trained on. Off: strictly on-policy. Empty: as the pipeline
    says; without a pipeline, on."""
    max_lag: int = Field(1, ge=0)
    """Most versions between the weights being updated and the weights that sampled a token."""
    on_max_lag: Literal["wait", "drop"] = "wait"
    """wait: a batch waits for sessions that would grow too old. drop: their groups are dropped, counted."""
    temperature: float = Field(1.0, ge=0, le=2)
    """Sampling temperature of the run's sessions, held-out ones too; overrides what the agent asks for."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling, likewise."""
    top_k: int = Field(0, ge=0)
    """Top-k sampling, likewise; 0 means no limit."""
    max_tokens: int = Field(64, ge=1)
    """Most tokens per turn."""
    ignored_fields: tuple[UndoneField, ...] = ()
    """Fields of agents' requests, as `presence_penalty`, that are ignored though they would change an answer:
    for clients that always send them. All that are not done here are refused otherwise."""
    concurrency: int = Field(128, ge=1, le=2**16)
    """Sessions one agent worker runs at once."""
    session_timeout_s: float = Field(120.0, gt=0)
    """A session that runs longer, pauses not counted, ends as `on_failure` says for `timeout`."""
    request_patience_s: float = Field(600.0, gt=0)
    """A request that no engine takes for this long, pauses counted, is refused (503); longer than a training
    step where no worker is left to rollout meanwhile."""
    session_attempts: int = Field(3, ge=1)
    """Times that a session is tried whose failure is to be tried again."""
    on_failure: FailureRules = FailureRules()
    failed_reward: float = Field(0.0, ge=-1e9, le=1e9)
    """Reward of a session that failed and counts; held-out ones that are not tried again earn it in any
    case."""
    batch_timeout_s: float = Field(1800.0, gt=0)
    """Longest wait for one batch; then the run fails and says what it waited for."""
    absence_timeout_s: float = Field(900.0, gt=0)
    """Longest wait for a batch or an evaluation while no engine, or no agent worker, is connected; then the
    run fails and says which is missing. An engine that loads is connected. Longer than a host takes to be
    replaced; counts where it is below `batch_timeout_s`."""


class TrainConfig(Settings):
    """The optimiser and the loss (GRPO; Shao et al. 2024, with DAPO's token mean and asymmetric clip)."""

    iterations: int = Field(40, ge=1)
    """RL iterations of the run."""
    workers: int = Field(1, ge=1)
    """Workers that train together, one rank each."""
    min_workers: int | None = Field(None, ge=1)
    """Fewest workers to go on with when one of them is lost. Empty: all of `workers`."""
    gang_timeout_s: float = Field(180.0, gt=0)
    """Longest that a rank waits for another: to begin, or to reach the next exchange of gradients. Then the
    train step fails, says who was missing, and is tried again. Also how long a trainer may be away before
    another worker trains instead. Longer than a worker takes to start and to load the policy, and than the
    writing of weights."""
    learning_rate: float = Field(3e-4, gt=0)
    """Constant learning rate of AdamW, after `warmup_steps`."""
    warmup_steps: int = Field(0, ge=0)
    """Optimiser steps over which the learning rate rises from 0."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """AdamW's averaging coefficients."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's weight decay."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this norm; 1e9 leaves them as they are."""
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
    num_tasks: int = Field(128, ge=1, le=2**16)
    """Held-out tasks."""


class EngineConfig(Settings):
    """What serves the policy on a rollout worker."""

    kind: Literal["torch", "scripted", "emulated"] = "torch"
    """torch: the built-in engine. scripted: canned answers without a model, for tests and benchmarks.
    emulated: engines and trainers sleep as long as the device of `emulation` would compute."""
    max_running: int = Field(128, ge=1)
    """Requests in one decoding batch."""
    context_length: int = Field(512, ge=16)
    """Most tokens of one sequence, prompt included."""
    kv_on_update: Literal["recompute", "keep"] = "recompute"
    """What happens to the KV cache of running requests when weights change."""
    script: Reference | None = None
    """For the scripted engine: function (prompt_ids, seed) -> ids of the answer, in the vocabulary of
    `policy.model` or the built-in policy (RUN/start/tokenizer.json). The turn ends with the last of them, or
    at an end-of-turn token. How a forced call begins is at the end of prompt_ids, and not in the answer."""


class EmulationConfig(Settings):
    """An emulated device and its policy: an H100 (SXM, bfloat16; data sheet), one shaped like Qwen3-8B."""

    peak_flops: float = Field(989e12, gt=0)
    """FLOP/s of the dtype computed in."""
    memory_bandwidth: float = Field(3.35e12, gt=0)
    """Bytes/s between the device and its memory."""
    utilisation: float = Field(0.4, gt=0, le=1)
    """Share of `peak_flops` that prefill and training reach."""
    parameters: float = Field(8.2e9, gt=0)
    """Of the policy."""
    bytes_per_parameter: float = Field(2.0, gt=0)
    """Of the weights."""
    kv_bytes_per_token: float = Field(147456.0, ge=0)
    """2 x layers x KV heads x head width x bytes of an element."""
    kv_tokens: int = Field(180_000, ge=0)
    """Room for keys and values, in tokens. From what an ended turn leaves there the next one goes on."""
    stored_bytes_per_parameter: float = Field(4.0, gt=0)
    """Bytes per parameter of stored weights: trainers write float32."""
    write_bandwidth: float = Field(0.1e9, gt=0)
    """Bytes/s at which a trainer stores weights and checkpoints: copies, hashes and writes them."""
    verify_bandwidth: float = Field(1e9, gt=0)
    """Bytes/s at which stored weights are read and hashed before they are published."""
    load_bandwidth: float = Field(0.7e9, gt=0)
    """Bytes/s at which an engine reads stored weights and takes them over."""
    to_rollout_s: float | None = Field(None, ge=0)
    """Emulated seconds until a device is an engine. Empty: it loads the first weights, then the newest."""
    to_train_s: float = Field(0.0, ge=0)
    """Emulated seconds until a device that was an engine can train: its trainer stays on it."""
    time_dilation: float = Field(1.0, gt=0)
    """Emulated seconds per real second: every duration is divided by it. Below 1 the run is slower than the
    device would be, so that a fleet's tokens/s fit one data plane."""


Word = Annotated[str, AfterValidator(is_word)]


def _is_known(kind: str) -> str:
    return known_device(kind).kind


class WorkerConfig(Settings):
    """One Dask worker process."""

    tags: tuple[Word, ...] = Field(min_length=1)
    """Capability tags: rollout, train, agent, reward, cpu, and words of your own."""
    device: str = Field("cpu", pattern=r"^(cpu|cuda:\d+)$")
    """What it computes on: cpu, or cuda:N. A worker on the cpu sees no GPU."""
    device_kind: Annotated[str, AfterValidator(_is_known)] | None = None
    """What that is, for example h100; decides who trains where workers could do either. Empty: unknown."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of the numerical libraries in this worker; by default one per core, at most 8. Workers may
    share cores: a thread that has nothing to do sleeps."""


class RunnersConfig(Settings):
    """How many workers of a kind work on a run at once: as many as its sessions need, within bounds."""

    min: int = Field(1, ge=1)
    """At least so many, also while there is nothing to do."""
    max: int = Field(ge=1)
    """At most so many, of those that carry the tag."""
    idle_s: float = Field(30.0, gt=0)
    """A worker that was not needed for so long is given back."""

    @model_validator(mode="after")
    def _is_a_range(self) -> RunnersConfig:
        if self.min > self.max:
            raise ValueError(f"min ({self.min}) must not exceed max ({self.max})")
        return self


class ClusterConfig(Settings):
    """Where the work runs."""

    scheduler: str | None = None
    """Address of a Dask scheduler whose workers carry tags as resources. Empty: local workers are started."""
    workers: dict[Word, WorkerConfig] = Field(
        {
            "r0": WorkerConfig(tags=("rollout",)),
            "t0": WorkerConfig(tags=("rollout", "train")),
            "a0": WorkerConfig(tags=("agent",)),
            "c0": WorkerConfig(tags=("cpu",)),
        }
    )
    """Local workers by name; not used with `scheduler`."""
    prefer: dict[Literal["rollout", "train"], tuple[Word, ...]] = Field({})
    """Tags to look for where several workers could train: {"train": ["h800"], "rollout": ["h20"]} has those
    with h800 train first and those with h20 last."""
    elastic: dict[Literal["agent", "reward"], RunnersConfig] = Field({})
    """Have the number of workers that run agents, or that score, follow the queue: {"agent": {"min": 1,
    "max": 4}}. A tag without bounds: every worker that carries it works throughout the run."""
    max_switches_per_minute: int = Field(120, ge=0)
    """Most changes of a trainer between training and rollout within any minute; beyond them it is not lent
    and waits for its batch. No bound where no other worker rolls out."""
    yield_timeout_s: float = Field(30.0, gt=0)
    """Longest from the revoking of a lease to the start of training on its worker; then the worker's process
    is killed and started again. Longer than one step of an engine and its unloading."""
    stage_timeout_s: float = Field(7200.0, gt=0)
    """Longest wait for a stage to end, the wait for its worker included; then the run fails and says what it
    waited for. Longer than `rollout.batch_timeout_s` and than a training step."""


class DataplaneConfig(Settings):
    """The process that stands between agents and engines."""

    url: PublicAddress | None = None
    """Address of a running `sf dataplane`. Empty: one is started on loopback. Its key is read from the
    environment variable SF_DATAPLANE_KEY; an address with a password, whole, from SF_DATAPLANE_URL."""


class StorageConfig(Settings):
    """Where run directories live."""

    root: str = "runs"
    """Folder or fsspec URL; a run's directory is root/run_id."""


class TrackConfig(Settings):
    """Experiment trackers that get the metrics beside the TensorBoard files. Servers and keys are read from
    the environment variables that each of them documents."""

    mlflow: str | None = Field(None, min_length=1)
    """Experiment of MLflow, at MLFLOW_TRACKING_URI. Empty: none."""
    wandb: str | None = Field(None, min_length=1)
    """Project of Weights & Biases; WANDB_MODE=offline writes files only. Empty: none."""


class RunConfig(Settings):
    """One training run."""

    run_id: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    """Name of the run and of its directory. Empty: a new one. A run of this name that is there goes on where
    it stopped, as it was configured but for what is set here to something else than the default."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Decides the policy's initial weights, the order of tasks and every draw."""
    pipeline: PipelineName | None = None
    """How rollout and training share the devices. colocated: every device does both in turn. disaggregated:
    trainers only train, rollout waits for them. async: trainers only train, rollout goes on meanwhile.
    multiplexed: trainers roll out between train steps, other workers go on meanwhile. Empty: the tags of the
    workers and `rollout.overlap` decide."""
    policy: PolicyConfig = PolicyConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    rollout: RolloutConfig = RolloutConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    engine: EngineConfig = EngineConfig()
    emulation: EmulationConfig = EmulationConfig()
    cluster: ClusterConfig = ClusterConfig()
    dataplane: DataplaneConfig = DataplaneConfig()
    storage: StorageConfig = StorageConfig()
    track: TrackConfig = TrackConfig()

    @model_validator(mode="after")
    def _check_across_fields(self) -> RunConfig:
        if self.rollout.max_tokens >= self.engine.context_length:
            raise ValueError(
                f"rollout.max_tokens ({self.rollout.max_tokens}) must be less than "
                f"engine.context_length ({self.engine.context_length})"
            )
        is_built_in = self.policy.model is None and self.engine.kind == "torch"
        if is_built_in and (length := self.engine.context_length) > BUILT_IN_CONTEXT:
            raise ValueError(
                f"engine.context_length ({length}) must not exceed the {BUILT_IN_CONTEXT} positions of the "
                "built-in policy"
            )
        if self.train.minibatches > self.rollout.groups_per_batch:
            raise ValueError(
                f"train.minibatches ({self.train.minibatches}) must not exceed "
                f"rollout.groups_per_batch ({self.rollout.groups_per_batch})"
            )
        if (self.train.min_workers or 1) > self.train.workers:
            raise ValueError(
                f"train.min_workers ({self.train.min_workers}) must not exceed "
                f"train.workers ({self.train.workers})"
            )
        if self.engine.kind == "scripted" and self.engine.script is None:
            raise ValueError("engine.script is required with engine.kind: scripted")
        allowed = PIPELINES[self.pipeline].overlap
        if self.rollout.overlap not in (None, *allowed):
            raise ValueError(
                f"pipeline {self.pipeline} means rollout.overlap: {str(allowed[0]).lower()}; "
                "leave one of the two out"
            )
        return self

    @property
    def overlap(self) -> bool:
        """Whether sampling for the next batch goes on while this one is trained on."""
        chosen = self.rollout.overlap
        return PIPELINES[self.pipeline].overlap[0] if chosen is None else chosen

    @property
    def lag_bound(self) -> int:
        """Most versions between the weights being updated and the weights that sampled a token."""
        return self.rollout.max_lag if self.overlap else 0

    @property
    def run_dir(self) -> str:
        assert self.run_id is not None
        return f"{self.storage.root.rstrip('/')}/{self.run_id}"
