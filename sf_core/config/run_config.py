"""Every setting of a run. The YAML file, config.json and the form in the Prefect UI are this one model.

Owns defaults and bounds. Reads no environment but variables that a path names, and starts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from sf_core.config.addresses import FilePath, refuse_user
from sf_core.config.contradictions import Sections, find_contradictions
from sf_core.config.devices import EmulationConfig, find_device
from sf_core.config.pipelines import PIPELINES, PipelineName
from sf_core.config.removed import drop_removed
from sf_core.config.rollout_config import MAX_TOGETHER, EnvironmentConfig, RolloutConfig
from sf_core.config.train_config import TrainConfig
from sf_core.settings import Derived, Fixed, Reference, Settings, is_word

PublicAddress = Annotated[str, AfterValidator(refuse_user)]
"""A URL without a user or password. The URL is stored with the run, and shown to everyone who can read the
run."""

# the names in the registry of engines, which settings must not import
EngineName = Literal["torch", "vllm", "scripted", "emulated"]
DtypeName = Literal["auto", "float32", "bfloat16"]


WARM_STEPS = 250
"""Number of warm-start steps of the built-in policy, if `policy.warmstart.steps` is empty."""


class WarmstartConfig(Settings):
    """Supervised training before the first iteration: the policy learns to imitate demonstrations."""

    steps: int | None = Field(None, ge=0)
    """Number of optimiser steps. 0: no supervised training. Empty: 250 for the built-in policy, 0 for
    `model`."""
    batch_size: int = Field(32, ge=1)
    """Number of demonstrations per optimiser step."""
    learning_rate: float | None = Field(None, gt=0)
    """Learning rate of the warm start. For the built-in policy, the rate decays on a cosine schedule to a
    tenth of this value. Empty: 5e-3 for the built-in policy, five times `train.learning_rate` for `model`."""
    label_smoothing: float | None = Field(None, ge=0, lt=1)
    """Label smoothing, for the built-in policy. After the warm start, at temperature 1, about this fraction
    of sampled tokens differs from the demonstrations, so that reinforcement learning has something to
    improve. Empty: 0.18."""
    demonstrations: FilePath | None = None
    """Path or URL of a JSONL file with demonstrations. Every worker must be able to read the file. Each line
    is {"messages": [...], "tools": [...]}, in the format that chat templates expect. Empty: the
    demonstrations of the environment."""


class PolicyConfig(Settings):
    """The model that the run trains."""

    model: FilePath | None = None
    """Folder of a Hugging Face causal LM from which training starts, or the name of a model that `sf model`
    has downloaded. Empty: the run creates the built-in policy, a small Qwen3 model."""
    adapter: FilePath | None = None
    """Folder of a PEFT adapter of `model`. Training starts from this adapter, and needs `train.lora`. Empty,
    with `train.lora`: the run creates an adapter that initially does not change the output of the model."""
    hidden_size: int = Field(128, ge=32, multiple_of=32)
    """Hidden size of the built-in policy."""
    num_layers: int = Field(4, ge=1, le=64)
    """Number of layers of the built-in policy."""
    sees: bool = False
    """true: the built-in policy is a small Qwen2.5-VL, which can read images. false: the built-in policy is
    a small Qwen3, which reads only text. If `model` is set, the files of the model decide whether the policy
    can read images."""
    warmstart: WarmstartConfig | None = WarmstartConfig()
    """Supervised training on demonstrations before the first iteration. null: no supervised training."""
    dtype: Annotated[DtypeName | None, Derived] = None
    """Number format in which the policy is computed, published and exported. The trainer always keeps its own
    weights in float32. auto: bfloat16 if the worker that creates version 0 computes bfloat16 at full speed (a
    GPU, or a CPU with avx512_bf16 or amx_bf16 in /proc/cpuinfo), float32 if not. Empty: auto for `model`,
    float32 for the built-in policy."""

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
    """Evaluation of the policy on held-out tasks. Sessions of held-out tasks are never trained on."""

    every: int = Field(10, ge=1)
    """Number of iterations between evaluations. Version 0 and the last version of the policy are always
    evaluated."""
    num_tasks: int = Field(128, ge=1, le=MAX_TOGETHER)
    """Number of held-out tasks per evaluation."""
    answers: Annotated[int, Fixed] = Field(1, ge=1, le=64)
    """Number of sessions per held-out task. The mean reward is computed over all sessions."""

    @model_validator(mode="after")
    def _are_not_too_many(self) -> EvaluateConfig:
        if self.num_tasks * self.answers > MAX_TOGETHER:
            raise ValueError(
                f"num_tasks ({self.num_tasks}) times answers ({self.answers}) must not exceed {MAX_TOGETHER}"
            )
        return self


class VllmConfig(Settings):
    """Settings of the vLLM server, for `engine.kind: vllm`."""

    arguments: tuple[Annotated[str, Field(pattern=r"^--[\w.-]+(=.*)?$")], ...] = ()
    """Additional command-line arguments for the vLLM servers that workers start, for example
    --gpu-memory-utilization=0.6."""
    sleep_level: int = Field(2, ge=1, le=2)
    """Place where a vLLM server keeps its weights while its worker has no rollout lease. 1: the host's
    memory. 2: storage, from which the server reads the weights again for the next lease. The setting applies
    only on a GPU: a vLLM server on a CPU always keeps its weights in memory."""

    @property
    def follows_grammars(self) -> bool:
        """Whether answers can be held to a grammar: not if the servers speculate."""
        return not any(argument.startswith("--spec") for argument in self.arguments)


class EngineConfig(Settings):
    """The inference engine of each rollout worker."""

    kind: EngineName = "torch"
    """Engine that samples. torch: the built-in engine. vllm: a vLLM server, which `make vllm` installs.
    scripted: fixed answers without a model, for tests and benchmarks. emulated: engines sleep for the time
    that the device in the section `emulation` would compute, and trainers do the same unless `train.backend`
    is set."""
    max_running: int = Field(128, ge=1)
    """Maximum number of requests that one engine decodes at a time."""
    context_length: Annotated[int | None, Derived] = Field(None, ge=16)
    """Maximum number of tokens of one sequence, prompt included. Empty: 512 for the built-in policy. With
    `policy.model`: four times `rollout.max_tokens`, plus the length of the longest of the first 64 training
    prompts (`Task.prompt`), up to the limit of the model. If agents are commands or run outside the cluster,
    a prompt of 3,072 tokens is assumed."""
    kv_on_update: Literal["recompute", "keep"] = "recompute"
    """Rule for the KV cache of running requests when the engine gets new weights. recompute: the engine
    computes the cache again with the new weights. keep: the engine keeps the cache that the old weights
    computed."""
    vllm: VllmConfig = VllmConfig()
    script: Reference | None = None
    """Function of the scripted engine: (prompt_ids, seed) -> token ids of the answer. The token ids refer to
    the vocabulary of `policy.model`, or to the vocabulary of the built-in policy (RUN/start/tokenizer.json).
    The turn ends after the last id or at an end-of-turn token. If the request forces a tool call,
    `prompt_ids` ends with the start of the call, and the answer must not repeat this start."""

    @property
    def context(self) -> int:
        """`context_length`, that of the built-in policy if none is given."""
        return self.context_length or 512


Word = Annotated[str, AfterValidator(is_word)]


def _is_known(kind: str) -> str:
    return find_device(kind).kind


class WorkerConfig(Settings):
    """One Dask worker process."""

    tags: tuple[Word, ...] = Field(min_length=1)
    """Capability tags of the worker: rollout, train, agent, reward, cpu, and any words of your own."""
    device: str | None = Field(None, pattern=r"^(cpu|cuda:\d+)$")
    """Device on which the worker computes: cpu or cuda:N. A worker on cpu sees no GPU. Empty: as long as
    torch finds a free GPU, each worker tagged rollout or train gets its own GPU, trainers first. Every other
    worker gets the CPU. With the environment variable SF_DEVICE=cpu, all workers without this setting get the
    CPU."""
    device_kind: Annotated[str, AfterValidator(_is_known)] | None = None
    """Kind of the worker's device, for example h100. If more than `train.workers` workers can train, the
    kinds of their devices decide which workers train. Empty: the kind is unknown."""
    threads: int | None = Field(None, ge=1)
    """Number of CPU threads that numerical libraries use in this worker. Workers may share cores, because
    idle threads sleep. Empty: one thread per core, up to 8."""


class ClusterConfig(Settings):
    """The Dask workers of a run, and the rules that assign work to them."""

    scheduler: str | None = None
    """Address of a Dask scheduler. The workers of the scheduler must carry their tags as Dask resources.
    Empty: the command starts local workers."""
    workers: dict[Word, WorkerConfig] = Field(
        {
            "r0": WorkerConfig(tags=("rollout",)),
            "t0": WorkerConfig(tags=("rollout", "train")),
            "a0": WorkerConfig(tags=("agent",)),
            "c0": WorkerConfig(tags=("cpu",)),
        }
    )
    """Local workers by name. Not used if `scheduler` is set. The default has the worker r0 for rollout, and
    the worker t0 for rollout and training. On a machine with one GPU, or without a GPU and with too little
    memory for two workers, the default leaves out r0, unless `pipeline` needs r0. Without r0, worker t0
    alternates between rollout and training."""
    prefer: dict[Literal["rollout", "train"], tuple[Word, ...]] = Field({})
    """Preferred tags of training workers, and preferred tags of rollout workers. The tags have an effect if
    more than `train.workers` workers can train. With {"train": ["h800"], "rollout": ["h20"]}, workers tagged
    h800 are chosen first for training. Workers tagged h20 are chosen last for training, which leaves them for
    rollout."""
    max_switches_per_minute: int = Field(120, ge=0)
    """Maximum number of times per minute that a trainer switches between training and rollout. After this
    number of switches, the trainer does not roll out again until the minute is over. The setting has no
    effect if only trainers roll out."""
    yield_timeout_s: float = Field(30.0, gt=0)
    """Timeout, in seconds, for a worker to stop rollout and start training after its rollout lease is
    revoked. When it expires, SeamlessFlow kills and restarts the worker process. Must exceed the time of one
    engine step. The time to read or write a checkpoint, measured at the start of the run, is added to the
    timeout."""
    stage_timeout_s: float = Field(7200.0, gt=0)
    """Timeout of one stage, in seconds, including the time that the stage waits for a worker. When it
    expires, the run fails. Must exceed `rollout.batch_timeout_s` and the time of a train step."""


class DataplaneConfig(Settings):
    """The data plane: the process between agents and engines."""

    url: PublicAddress | None = None
    """Address of a running `sf dataplane`. The environment variable SF_DATAPLANE_KEY contains the key of a
    data plane on another machine. If the address contains a password, leave this setting empty and set the
    environment variable SF_DATAPLANE_URL to the address. Empty, without SF_DATAPLANE_URL: the command starts
    a data plane on the loopback address."""


class StorageConfig(Settings):
    """The place where runs are stored."""

    root: FilePath = "runs"
    """Folder that contains the directories of all runs: a local folder, or a URL that fsspec supports. The
    directory of a run is root/run_id."""


class TrackConfig(Settings):
    """Experiment trackers that receive the metrics of the run. TensorBoard files are always written. The
    environment variables of a tracker set its server and its key."""

    mlflow: str | None = Field(None, min_length=1)
    """Name of the MLflow experiment. The environment variable MLFLOW_TRACKING_URI sets the MLflow server.
    Empty: no metrics are sent to MLflow."""
    wandb: str | None = Field(None, min_length=1)
    """Name of the Weights & Biases project. With the environment variable WANDB_MODE=offline, metrics are
    only written to local files. Empty: no metrics are sent to Weights & Biases."""


class RunConfig(Settings):
    """One training run."""

    run_id: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    """Name of the run and of the run's directory. If a run with this name exists, it continues with its
    stored settings. A setting given now overrides the stored setting, unless the given value equals the
    default. Empty: SeamlessFlow generates a new name."""
    seed: Annotated[int, Fixed] = Field(0, ge=0, lt=2**32)
    """Random seed for the initial weights of the policy, the order of tasks and all sampling."""
    pipeline: PipelineName | None = None
    """Division of the devices between rollout and training. colocated: every device alternates between
    rollout and training. disaggregated: trainers only train, and rollout waits during train steps. async:
    trainers only train, and rollout continues during train steps. multiplexed: trainers also roll out between
    train steps, and the other rollout workers always roll out. Empty: the tags of the workers and
    `rollout.overlap` decide; with `train.lora` and vLLM, and on CPUs that trainers share with other rollout
    workers, trainers only train."""
    policy: Annotated[PolicyConfig, Fixed] = PolicyConfig()
    environment: Annotated[EnvironmentConfig, Fixed] = EnvironmentConfig()
    rollout: RolloutConfig = RolloutConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    engine: EngineConfig = EngineConfig()
    emulation: EmulationConfig = EmulationConfig()
    cluster: ClusterConfig = ClusterConfig()
    dataplane: DataplaneConfig = DataplaneConfig()
    storage: StorageConfig = StorageConfig()
    track: TrackConfig = TrackConfig()

    @model_validator(mode="before")
    @classmethod
    def _drop_removed(cls, data: Any) -> Any:
        return drop_removed(data)

    @model_validator(mode="after")
    def _check_across_fields(self) -> RunConfig:
        tokens = self.rollout.max_tokens
        context = self.engine.context_length
        if self.policy.model is None:
            tokens = self.rollout.turn_tokens
            context = self.engine.context
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
                f"pipeline {self.pipeline} requires rollout.overlap: {str(allowed[0]).lower()}; leave one "
                "of the two out"
            )
        return self

    def _check_ranks(self) -> None:
        train = self.train
        cut = (
            f"train.tensor_parallel ({train.tensor_parallel}) times train.pipeline_parallel "
            f"({train.pipeline_parallel})"
        )
        if train.ranks_per_policy > 1 and train.backend != "megatron":
            raise ValueError(
                f"{cut} needs train.backend megatron; other backends do not split a policy this way"
            )
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
        train = self.train
        cluster = self.cluster
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
