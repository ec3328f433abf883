"""Settings of training, a section of the one model in run_config.py."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from sf_core.config.addresses import FilePath, check_server_url
from sf_core.recipes.advantages import AnyAdvantage, Grpo
from sf_core.recipes.losses import Critic, LossConfig
from sf_core.recipes.samples import Score
from sf_core.recipes.selections import AnySelection
from sf_core.recipes.teachers import Teacher
from sf_core.recipes.weights import AnyWeight
from sf_core.settings import Derived, Fixed, Settings

Share = Annotated[float, Field(ge=0, lt=1)]

# the names in the registry of training, which settings must not import
TrainerName = Literal["torch", "megatron", "emulated"]

PackingRule = Literal["distinct", "padded"]

DEFAULT_PASS_TOKENS = 8192

SMALLEST_RATE = 1e-6
LARGEST_RATE = 3e-4

CHECKPOINT_BYTES = 12
"""Size of a checkpoint, in bytes per parameter: the weight and the two moments of Adam, in float32."""

SMALL_CHECKPOINT = 1_000_000_000
"""Size, in bytes, below which checkpoints are stored after every iteration if `checkpoint_every` is empty."""


LORA_RATES = 10
"""Learning rate of an adapter, divided by the learning rate of training all weights."""

BUILT_IN_LORA_RATES = 3
"""The same for the built-in policy, which learns nothing at ten times its rate."""


def rate_for(parameters: int, *, is_adapter: bool = False) -> float:
    """Learning rate for a policy of this size, or for an adapter of it. It was tried at 135 million
    parameters, 2e-5; from there it falls with the square root of the size.

    >>> rate_for(135_000_000), rate_for(8_000_000_000), rate_for(8_000_000_000, is_adapter=True)
    (2e-05, 2.6e-06, 2.6e-05)
    """
    rate = float(f"{2e-5 * (135e6 / max(1, parameters)) ** 0.5:.2g}")
    rate = min(LARGEST_RATE, max(SMALLEST_RATE, rate))
    return float(f"{LORA_RATES * rate:.2g}") if is_adapter else rate


def rate_of_built_in(parameters: int, *, is_adapter: bool = False) -> float:
    """Learning rate for the built-in policy of this size, or for an adapter of it. It was tried at one
    million parameters; above 1.5 million it falls with the power 0.6 of the size.

    >>> rate_of_built_in(1_000_000), rate_of_built_in(15_000_000), rate_of_built_in(1, is_adapter=True)
    (0.001, 0.00025, 0.003)
    """
    rate = float(f"{1e-3 * min(1.0, (1.5e6 / max(1, parameters)) ** 0.6):.2g}")
    return float(f"{BUILT_IN_LORA_RATES * rate:.2g}") if is_adapter else rate


def interval_for(parameters: int) -> int:
    """Iterations between checkpoints of this many trained parameters.

    >>> interval_for(1_000_000), interval_for(135_000_000)
    (1, 10)
    """
    return 1 if CHECKPOINT_BYTES * parameters < SMALL_CHECKPOINT else 10


LARGEST_RANK = 512
"""Highest rank of an adapter. vLLM does not support a higher rank."""


class LoraConfig(Settings):
    """A low-rank adapter (Hu et al. 2021). Only the adapter is trained; the weights of the policy itself do
    not change."""

    rank: Annotated[int | None, Derived] = Field(None, ge=1, le=LARGEST_RANK)
    """Rank of the two factors that the adapter has per layer. Empty: the rank of `policy.adapter`, or 32 if
    `policy.adapter` is empty."""
    alpha: Annotated[float | None, Derived] = Field(None, gt=0)
    """Scale of the adapter: the product of the two factors is multiplied by alpha / rank. Empty: the alpha of
    `policy.adapter`, or twice the rank if `policy.adapter` is empty."""
    targets: Annotated[tuple[str, ...] | None, Derived] = Field(None, min_length=1)
    """Linear layers that get an adapter. Give the last part of the name of each layer, for example q_proj.
    Empty: the layers of `policy.adapter`, or all linear layers of the blocks if `policy.adapter` is empty. A
    mixture of experts needs this setting, because its experts are not linear layers and get no adapter."""


class TeacherConfig(Teacher):
    """The teacher trains the policy in addition to the rewards. With `train.advantage: none`, only the
    teacher trains the policy. Give exactly one of `model`, `url` and `weights`. Every token in the policy's
    vocabulary must have the same id in the teacher's vocabulary."""

    model: FilePath | None = None
    """Folder of a Hugging Face causal LM, the name of a model that `sf model` has downloaded, or RUN@VERSION:
    a version of the policy of the run in the folder RUN. Every training worker must be able to read the
    folder, and the folder must not change during the run. Each training worker keeps a part of the teacher's
    weights in memory."""
    url: Annotated[str, AfterValidator(check_server_url)] | None = None
    """Address of a vLLM server, for `divergence: sampled`. The filter stage asks the server for the log-probs
    of the trained tokens. The environment variable SF_TEACHER_KEY contains the key of the server."""
    weights: Literal["start"] | None = None
    """Version of the policy that is the teacher. start: version 0, which keeps later versions close to
    version 0. With `train.lora`, this teacher needs no additional memory."""
    tokenizer: FilePath | None = None
    """Folder with the tokenizer of the teacher, for a teacher at `url`."""
    timeout_s: float = Field(600.0, gt=0)
    """Time, in seconds, during which the filter stage retries a request while the server at `url` does not
    answer."""

    @model_validator(mode="after")
    def _is_named_once(self) -> TeacherConfig:
        named = [name for name in ("model", "url", "weights") if getattr(self, name) is not None]
        if len(named) != 1:
            given = " and ".join(named) or "none of them"
            raise ValueError(f"set exactly one of `model`, `url` and `weights`; given: {given}")
        if self.url is not None and self.is_loss:
            raise ValueError(
                "the server at `url` returns only log-probs of sampled tokens: set `divergence` to sampled, "
                "or set `model` instead of `url`"
            )
        if (self.url is None) != (self.tokenizer is None):
            raise ValueError(
                "set both `url` and `tokenizer`, or neither: `tokenizer` is the folder with the tokenizer "
                "of the teacher at `url`"
            )
        return self


class TrainConfig(Settings):
    """The optimiser and the loss. Default: GRPO (Shao et al. 2024), with the token mean and the clip bounds
    of DAPO."""

    iterations: int = Field(40, ge=1)
    """Number of iterations of the run. Each iteration trains on one batch."""
    backend: TrainerName | None = None
    """Implementation of the trainer. torch: PyTorch. megatron: Megatron-core, for a policy of model_type
    llama, qwen2 or qwen3; the extra [megatron] of seamlessflow installs it. emulated: trainers sleep for the
    time that the device in the section `emulation` would compute, and produce no weights; `engine.kind` must
    not be torch. Empty: emulated if `engine.kind` is emulated, torch if not."""
    workers: int = Field(1, ge=1)
    """Number of training workers. All training workers compute each train step together, one rank per
    worker."""
    min_workers: int | None = Field(None, ge=1)
    """Minimum number of training workers. If a worker is lost, the run continues while at least this number
    of workers is left. Empty: the value of `workers`."""
    tensor_parallel: int = Field(1, ge=1)
    """Number of workers over which the megatron backend splits each layer of the policy."""
    pipeline_parallel: int = Field(1, ge=1)
    """Number of pipeline stages over which the megatron backend splits the layers of the policy."""
    gang_timeout_s: float = Field(180.0, gt=0)
    """Maximum time, in seconds, that a rank waits for another rank, at the start of a train step or while
    gradients are exchanged. When it expires, the train step fails with an error that names the missing ranks,
    and is retried. If a trainer is lost for longer than this time, another worker replaces the trainer. The
    time to read or write a checkpoint, measured at the start of the run, is added to the timeout."""
    learning_rate: Annotated[float | None, Derived] = Field(None, gt=0)
    """Learning rate of AdamW in train steps. The learning rate is constant after `warmup_steps`. Empty, with
    `policy.model`: 2e-5 x sqrt(135 million / N) for N parameters, between 1e-6 and 3e-4; with `lora` ten
    times this value. Empty, for the built-in policy: 1e-3 up to 1.5 million parameters, and
    1e-3 x (1.5 million / N)^0.6 above; with `lora` three times this value."""
    warmup_steps: int = Field(0, ge=0)
    """Number of optimiser steps during which the learning rate rises from 0."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """Decay rates of the first and the second moment of AdamW."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay of AdamW."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Maximum norm of the gradient. A gradient with a larger norm is scaled down to this norm. 1e9: gradients
    are not scaled."""
    select: AnySelection | None = None
    """Rule that selects the sessions of a batch for training. Advantages are computed from the
    selected sessions alone. Empty: all sessions are used."""
    advantage: AnyAdvantage = Grpo()
    """Formula that computes the advantage of every token from the rewards."""
    weights: tuple[AnyWeight, ...] = ()
    """Formulas that exclude tokens from training or scale the advantages of tokens. The formulas are applied
    in the order of this list."""
    loss: LossConfig = LossConfig()
    teacher: TeacherConfig | None = None
    """Another model whose log-probs the policy learns to match. Empty: no teacher."""
    lora: Annotated[LoraConfig | None, Fixed] = None
    """Adapter (LoRA) to train instead of the weights of the policy. Empty: all weights of the policy are
    trained."""
    critic: Annotated[Critic | None, Fixed] = None
    """Network that learns to predict the reward, for `advantage: gae`. Empty: no critic."""
    max_engine_difference: float = Field(0.1, gt=0)
    """Maximum mean difference, in nats, between the log-probs that engines recorded and the log-probs that
    the trainer computes with the same weights. Above this value the train step fails. Raise this value if
    `engine.kv_on_update: keep` causes the difference."""
    minibatches: int = Field(1, ge=1)
    """Number of optimiser steps per batch. All sessions of a group are in the same optimiser step."""
    tokens_per_microbatch: int | None = Field(None, ge=64)
    """Maximum number of tokens per forward and backward pass. A prefix that several rows share counts once. A
    row that is longer than the maximum has a pass of its own. Empty: 8192, or twice the longest row if this
    is more."""
    packing: PackingRule = "distinct"
    """What `tokens_per_microbatch` counts. distinct: a prefix that several rows share counts once. padded:
    the number of rows times the longest row, as in runs of earlier versions. Architectures that the trainer
    runs with the code of transformers are always packed as padded."""
    recompute: bool = False
    """true: the backward pass recomputes the activations of each block of the network, instead of storing
    them. Training then takes about a third more computation, and the memory for activations hardly grows with
    the number of layers."""
    checkpoint_every: Annotated[int | None, Derived] = Field(None, ge=1)
    """Number of iterations between checkpoints. After a training worker is lost, the run repeats the
    iterations since the newest checkpoint, from stored batches. Empty: 1 for the built-in policy. Empty, with
    `policy.model`: 1 if a checkpoint takes less than 1 GB (fewer than 83 million trained parameters), 10 if
    not."""
    keep_checkpoints: int = Field(2, ge=1)
    """Number of newest checkpoints to keep. When a new checkpoint is complete, older checkpoints are
    removed."""
    keep_weights: int | None = Field(None, ge=1)
    """Number of newest policy versions whose weights are kept. Weights of these versions are always kept:
    every tenth version, evaluated versions, the reference of `loss.kl`, versions that an engine uses or
    loads, and versions that are being published. Empty: all versions if the weights of a version take less
    than 50 MB, 2 if not."""
    keep_every: int | None = Field(None, ge=1)
    """Number of iterations between checkpoints that are never removed. Empty: only the `keep_checkpoints`
    newest checkpoints are kept."""

    @property
    def pass_tokens(self) -> int:
        """Most tokens of a pass over short rows."""
        return self.tokens_per_microbatch or DEFAULT_PASS_TOKENS

    @property
    def rate(self) -> float:
        """The learning rate, that of a small built-in policy if none is given."""
        if self.learning_rate is not None:
            return self.learning_rate
        return rate_of_built_in(1, is_adapter=self.lora is not None)

    @property
    def interval(self) -> int:
        """Iterations between checkpoints, that of a small policy if none is given."""
        return self.checkpoint_every or 1

    @property
    def needs(self) -> frozenset[Score]:
        """Scores that advantages and weights take; with any, they are made in the train step."""
        maps = self.advantage.needs.union(*(weight.needs for weight in self.weights))
        if self.teacher is not None:
            maps |= self.teacher.needs
        kl = self.loss.kl
        return maps | {"start", "reference"} if kl is not None and kl.place == "reward" else maps

    @property
    def ranks_per_policy(self) -> int:
        """Number of ranks that hold one copy of the policy together."""
        return self.tensor_parallel * self.pipeline_parallel

    def largest_gang(self, workers: int) -> int:
        """Number of ranks that can train where there are so many workers."""
        ranks = min(workers, self.workers)
        return ranks - ranks % self.ranks_per_policy
