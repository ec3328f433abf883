"""Every setting of a run. The YAML file, config.json and the form in the Prefect UI are this one model.

Owns defaults and bounds. Reads no environment but variables that a path names, and starts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from sf_core.config.addresses import FilePath, check_server_url, refuse_user
from sf_core.config.contradictions import Sections, find_contradictions
from sf_core.config.devices import find_device
from sf_core.config.pipelines import PIPELINES, PipelineName
from sf_core.config.rollout_config import MAX_TOGETHER, EnvironmentConfig, RolloutConfig
from sf_core.config.train_config import TrainConfig
from sf_core.settings import Reference, Settings, is_word

PublicAddress = Annotated[str, AfterValidator(refuse_user)]
"""A URL without a user or password: it is stored with the run and shown to its readers."""

# the names in the registry of engines, which settings must not import
EngineName = Literal["torch", "vllm", "scripted", "emulated"]
DtypeName = Literal["auto", "float32", "bfloat16"]


WARM_STEPS = 150
"""Steps of the warm start of the built-in policy, unless `policy.warmstart.steps` says otherwise."""


class WarmstartConfig(Settings):
    """Supervised start: before the first iteration the policy learns to imitate demonstrations."""

    steps: int | None = Field(None, ge=0)
    """Number of optimiser steps; 0 leaves the policy as it is. Empty: 150 for the built-in policy, 0 for
    `model`."""
    batch_size: int = Field(64, ge=1)
    """Demonstrations per step."""
    learning_rate: float | None = Field(None, gt=0)
    """Learning rate. That of the built-in policy decays to a tenth on a cosine schedule. Empty: 3e-3 for the
    built-in policy, five times `train.learning_rate` for `model`."""
    label_smoothing: float | None = Field(None, ge=0, lt=1)
    """Label smoothing of the built-in policy: about this fraction of tokens is sampled off the demonstration
    at temperature 1, which leaves reinforcement learning something to improve. Empty: 0.18."""
    demonstrations: FilePath | None = None
    """Path or URL of a JSONL file, on every worker: {"messages": [...], "tools": [...]} in each line, as chat
    templates take them. Empty: those of the environment."""


class PolicyConfig(Settings):
    """The model under training."""

    model: FilePath | None = None
    """Folder of a Hugging Face causal LM to start from, or the name of one that `sf model` has made. Empty: a
    small built-in Qwen3 policy is created."""
    adapter: FilePath | None = None
    """Folder of an adapter of this model in PEFT's form, to start from, with `train.lora`. Empty: an adapter
    that changes nothing yet."""
    hidden_size: int = Field(128, ge=32, multiple_of=32)
    """Hidden size of the built-in policy."""
    num_layers: int = Field(4, ge=1, le=64)
    """Number of layers of the built-in policy."""
    sees: bool = False
    """Whether the built-in policy is shown pictures, as a small Qwen2.5-VL; a `model` tells by its files."""
    warmstart: WarmstartConfig | None = WarmstartConfig()
    """Supervised start, on demonstrations. Empty: none."""
    dtype: DtypeName | None = None
    """Element type in which the policy is computed, published and exported. The trainer's own weights are
    float32. auto: bfloat16 if the worker that makes version 0 computes in it at full speed (a GPU, or a CPU
    with avx512_bf16 or amx_bf16 in /proc/cpuinfo), else float32. Empty: auto for `model`, float32 for the
    built-in policy."""

    @property
    def dtype_name(self) -> DtypeName:
        """`dtype`, that of the built-in policy if none is given."""
        return self.dtype or "float32"

    @property
    def warm_steps(self) -> int:
        """Number of optimiser steps of the warm start."""
        if self.warmstart is None:
            return 0
        default = WARM_STEPS if self.model is None else 0
        return default if self.warmstart.steps is None else self.warmstart.steps


class EvaluateConfig(Settings):
    """Evaluation on held-out tasks; its sessions are never trained on."""

    every: int = Field(10, ge=1)
    """Iterations between evaluations; the first and the last policy are always evaluated."""
    num_tasks: int = Field(128, ge=1, le=MAX_TOGETHER)
    """Number of held-out tasks."""
    answers: int = Field(1, ge=1, le=64)
    """Sessions per held-out task. The mean counts all of them."""

    @model_validator(mode="after")
    def _are_not_too_many(self) -> EvaluateConfig:
        if self.num_tasks * self.answers > MAX_TOGETHER:
            raise ValueError(
                f"num_tasks ({self.num_tasks}) times answers ({self.answers}) must not exceed {MAX_TOGETHER}"
            )
        return self


class VllmConfig(Settings):
    """vLLM's server, with `engine.kind: vllm`."""

    url: Annotated[str, AfterValidator(check_server_url)] | None = None
    """Address of a running vLLM server, for one rollout worker on the host that reads the run's folder as the
    server does. It needs --enable-scale-out, --logprobs-mode processed_logprobs and, in its environment,
    VLLM_SERVER_DEV_MODE=1; its key is read from the environment variable SF_VLLM_KEY. Empty: each rollout
    worker starts one."""
    arguments: tuple[Annotated[str, Field(pattern=r"^--[\w.-]+(=.*)?$")], ...] = ()
    """Further arguments of the servers that are started, such as --gpu-memory-utilization=0.6."""
    sleep_level: int = Field(2, ge=1, le=2)
    """What a server on a GPU does with its weights between leases. 1: keeps them in the host's memory. 2:
    drops them, and reads them again. On the CPU a server keeps all of its memory."""

    @property
    def follows_grammars(self) -> bool:
        """Whether answers can be held to a grammar: by servers that are started, unless they speculate."""
        return self.url is None and not any(argument.startswith("--spec") for argument in self.arguments)


class EngineConfig(Settings):
    """The inference engine of a rollout worker."""

    kind: EngineName = "torch"
    """torch: the built-in engine. vllm: a vLLM server, which `make vllm` installs. scripted: canned answers
    without a model, for tests and benchmarks. emulated: engines, and trainers unless `train.backend` says
    otherwise, sleep as long as the device of `emulation` would compute."""
    max_running: int = Field(128, ge=1)
    """Maximum number of requests in one decoding batch."""
    context_length: int | None = Field(None, ge=16)
    """Maximum number of tokens of one sequence, prompt included. Empty: 512 for the built-in policy. With
    `policy.model` the length of the longest of the first 64 training prompts (`Task.prompt`) plus four times
    `rollout.max_tokens`, and no more than the longest sequence that the model is for. If agents are commands
    or outside, a prompt of 3,072 tokens is assumed."""
    kv_on_update: Literal["recompute", "keep"] = "recompute"
    """What happens to the KV cache of running requests when weights change."""
    vllm: VllmConfig = VllmConfig()
    script: Reference | None = None
    """Function of the scripted engine: (prompt_ids, seed) -> token ids of the answer, in the vocabulary of
    `policy.model` or the built-in policy (RUN/start/tokenizer.json). The turn ends after the last id, or at
    an end-of-turn token. The start of a forced tool call ends prompt_ids and is not part of the answer."""

    @property
    def context(self) -> int:
        """`context_length`, that of the built-in policy if none is given."""
        return self.context_length or 512


class EmulationConfig(Settings):
    """The emulated device and policy; by default an H100 (SXM, bfloat16; data sheet) and Qwen3-8B's shape."""

    peak_flops: float = Field(989e12, gt=0)
    """Peak FLOP/s of the device in the dtype it computes in."""
    memory_bandwidth: float = Field(3.35e12, gt=0)
    """Memory bandwidth of the device, in bytes/s."""
    utilisation: float = Field(0.4, gt=0, le=1)
    """Fraction of `peak_flops` that prefill, decoding and training reach."""
    parameters: float = Field(8.2e9, gt=0)
    """Number of parameters of the policy."""
    bytes_per_parameter: float = Field(2.0, gt=0)
    """Bytes per parameter of the weights in device memory."""
    kv_bytes_per_token: float = Field(147456.0, ge=0)
    """Bytes of KV cache per token: 2 x layers x KV heads x head width x bytes per element."""
    kv_tokens: int = Field(180_000, ge=0)
    """Capacity of the KV cache in tokens; a turn reuses what an earlier one left in it. 0: no reuse."""
    stored_bytes_per_parameter: float = Field(2.0, gt=0)
    """Bytes per parameter that a trainer writes for each version: 2 in bfloat16, 4 in float32."""
    delta_bytes_per_parameter: float = Field(0.03, gt=0)
    """Bytes per parameter that an engine's host reads for each version: about 0.03 for a delta in bfloat16, 4
    in float32, which has no deltas."""
    write_bandwidth: float = Field(0.45e9, gt=0)
    """Bytes/s at which a trainer copies, hashes and writes weights and checkpoints."""
    verify_bandwidth: float = Field(2e9, gt=0)
    """Speed at which an engine's host checks its copy of the weights and hands them over, in bytes/s."""
    load_bandwidth: float = Field(0.7e9, gt=0)
    """Bytes/s at which an engine's host reads stored weights."""
    to_rollout_s: float | None = Field(None, ge=0)
    """Emulated seconds until a device is an engine. Empty: the time to load the weights that its host has."""
    to_train_s: float = Field(0.0, ge=0)
    """Emulated seconds until a device that served as an engine can train; its trainer stays loaded."""
    time_dilation: float = Field(1.0, gt=0)
    """Emulated seconds per real second: every duration is divided by it. Below 1 the run is slower than the
    real devices, so that one data plane can carry the tokens/s of a fleet."""


Word = Annotated[str, AfterValidator(is_word)]


def _is_known(kind: str) -> str:
    return find_device(kind).kind


class WorkerConfig(Settings):
    """One Dask worker process."""

    tags: tuple[Word, ...] = Field(min_length=1)
    """Capability tags: rollout, train, agent, reward, cpu, and any words of your own."""
    device: str | None = Field(None, pattern=r"^(cpu|cuda:\d+)$")
    """Device that the worker computes on: cpu or cuda:N. A worker on cpu sees no GPU. Empty: a worker
    that carries rollout or train gets a GPU of its own while torch finds a free one, trainers first; every
    other worker gets the CPU. The environment variable SF_DEVICE=cpu gives all of these the CPU."""
    device_kind: Annotated[str, AfterValidator(_is_known)] | None = None
    """Kind of that device, for example h100; decides which of several able workers train. Empty: unknown."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of the numerical libraries in this worker; by default one per core, at most 8. Workers may
    share cores: idle threads sleep."""


class RunnersConfig(Settings):
    """Bounds on the number of workers with a tag that a run uses at once; between them it follows demand."""

    min: int = Field(1, ge=1)
    """Minimum number of workers, kept even while there is nothing to do."""
    max: int = Field(ge=1)
    """Maximum number of workers, of those that carry the tag."""
    idle_s: float = Field(30.0, gt=0)
    """Time after which a worker that was not needed is released."""

    @model_validator(mode="after")
    def _is_a_range(self) -> RunnersConfig:
        if self.min > self.max:
            raise ValueError(f"min ({self.min}) must not exceed max ({self.max})")
        return self


class ClusterConfig(Settings):
    """The Dask workers of a run, and how they are shared between its tasks."""

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
    """Local workers by name; not used with `scheduler`. On a machine with one GPU the default has no r0,
    unless `pipeline` needs it: t0 samples and trains in turn."""
    prefer: dict[Literal["rollout", "train"], tuple[Word, ...]] = Field({})
    """Preferred tags where several workers could train: with {"train": ["h800"], "rollout": ["h20"]}, workers
    tagged h800 are chosen first and workers tagged h20 last."""
    elastic: dict[Literal["agent", "reward"], RunnersConfig] = Field({})
    """Bounds between which the number of agent or reward workers follows the queue: {"agent": {"min": 1,
    "max": 4}}. For a tag without bounds, every worker that carries it works throughout the run."""
    max_switches_per_minute: int = Field(120, ge=0)
    """Maximum number of switches of a trainer between training and rollout within any minute; beyond it the
    trainer is not lent and waits for its batch. Not applied if no other worker rolls out."""
    yield_timeout_s: float = Field(30.0, gt=0)
    """Longest time from revoking a lease to the start of training on its worker; then the worker process is
    killed and restarted. Must exceed one engine step; the time to read or write a checkpoint, as measured
    when the run started, comes on top."""
    stage_timeout_s: float = Field(7200.0, gt=0)
    """Timeout for one stage, including the time it waits for a worker; the run then fails. Must exceed
    `rollout.batch_timeout_s` and a train step."""


class DataplaneConfig(Settings):
    """The data plane, which is the process between agents and engines."""

    url: PublicAddress | None = None
    """Address of a running `sf dataplane`. Empty: one is started on loopback. Its key is read from the
    environment variable SF_DATAPLANE_KEY. An address with a password must be given in SF_DATAPLANE_URL."""


class StorageConfig(Settings):
    """Where run directories are stored."""

    root: FilePath = "runs"
    """Folder or fsspec URL; a run's directory is root/run_id."""


class TrackConfig(Settings):
    """Experiment trackers that receive the metrics besides the TensorBoard files. Servers and keys are read
    from the environment variables that each tracker documents."""

    mlflow: str | None = Field(None, min_length=1)
    """Name of the MLflow experiment, on the server MLFLOW_TRACKING_URI. Empty: MLflow is not used."""
    wandb: str | None = Field(None, min_length=1)
    """Weights & Biases project; WANDB_MODE=offline only writes files. Empty: Weights & Biases is not used."""


class RunConfig(Settings):
    """One training run."""

    run_id: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    """Name of the run and of its directory. Empty: a new name is generated. An existing run resumes where it
    stopped, with its stored settings except those that are given here and differ from the default."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Random seed of the policy's initial weights, the order of tasks and all sampling."""
    pipeline: PipelineName | None = None
    """How rollout and training share the devices. colocated: every device does both in turn. disaggregated:
    trainers only train, rollout waits meanwhile. async: trainers only train, rollout continues meanwhile.
    multiplexed: trainers also roll out, between train steps, and other workers always do. Empty: the tags of
    the workers and `rollout.overlap` decide; with `train.lora` and vLLM trainers only train."""
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
        tokens, context = self.rollout.max_tokens, self.engine.context_length
        if self.policy.model is None:
            tokens, context = self.rollout.turn_tokens, self.engine.context
        if tokens is not None and context is not None and tokens >= context:
            raise ValueError(
                f"rollout.max_tokens ({tokens}) must be less than engine.context_length ({context})"
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
        self._check_ranks()
        if self.engine.kind == "scripted" and self.engine.script is None:
            raise ValueError("engine.script is required with engine.kind: scripted")
        sections = Sections(self.environment, self.rollout, self.train, self.lag_bound)
        if found := find_contradictions(sections):
            raise ValueError("; ".join(found))
        allowed = PIPELINES[self.pipeline].overlap
        if self.rollout.overlap not in (None, *allowed):
            raise ValueError(
                f"pipeline {self.pipeline} means rollout.overlap: {str(allowed[0]).lower()}; "
                "leave one of the two out"
            )
        return self

    def _check_ranks(self) -> None:
        train = self.train
        cut = (
            f"train.tensor_parallel ({train.tensor_parallel}) times train.pipeline_parallel "
            f"({train.pipeline_parallel})"
        )
        if train.ranks_per_policy > 1 and train.backend != "megatron":
            raise ValueError(f"{cut} needs train.backend megatron; other backends do not cut a policy so")
        for name, number in {"workers": train.workers, "min_workers": train.min_workers or 0}.items():
            if number % train.ranks_per_policy:
                raise ValueError(f"train.{name} ({number}) must be a multiple of {cut}")

    @property
    def overlap(self) -> bool:
        """Whether sampling for the next batch continues while this one is trained on."""
        chosen = self.rollout.overlap
        return PIPELINES[self.pipeline].overlap[0] if chosen is None else chosen

    @property
    def lag_bound(self) -> int:
        """Maximum lag of a trained token in policy versions: `rollout.max_lag`, or 0 without overlap."""
        return self.rollout.max_lag if self.overlap else 0

    def with_time_to_move(self, seconds: float) -> RunConfig:
        """These settings with so much more time where a policy may have to be loaded or written first."""
        train, cluster = self.train, self.cluster
        longer = {"gang_timeout_s": train.gang_timeout_s + seconds}
        lent = {
            "yield_timeout_s": cluster.yield_timeout_s + seconds,
            "stage_timeout_s": cluster.stage_timeout_s + seconds,
        }
        return self.model_copy(
            update={"train": train.model_copy(update=longer), "cluster": cluster.model_copy(update=lent)}
        )

    def leaves_open(self, key: str) -> bool:
        """Whether the setting of this key has no value yet and is derived where the run begins."""
        return attrgetter(key)(self) in (None, "auto")

    def fill(self, values: Mapping[str, Any]) -> RunConfig:
        """These settings with those values, by their keys, where they leave them open."""
        filled = self
        for key, value in values.items():
            if filled.leaves_open(key):
                filled = filled.put(key.split("."), value)
        return filled

    @property
    def run_dir(self) -> str:
        assert self.run_id is not None
        return f"{self.storage.root.rstrip('/')}/{self.run_id}"
