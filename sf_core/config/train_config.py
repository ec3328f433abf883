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
from sf_core.settings import Settings

Share = Annotated[float, Field(ge=0, lt=1)]

# the names in the registry of training, which settings must not import
TrainerName = Literal["torch", "megatron", "emulated"]


SMALLEST_RATE, LARGEST_RATE = 1e-6, 3e-4

CHECKPOINT_BYTES = 12
"""Size of a checkpoint in bytes per parameter: the weight and Adam's two moments, in float32."""

SMALL_CHECKPOINT = 1_000_000_000
"""Checkpoints of fewer bytes are stored after every iteration, unless `checkpoint_every` says otherwise."""


LORA_RATES = 10
"""How many times that of training all weights the learning rate of an adapter is."""


def rate_for(parameters: int, power: float = 0.5, *, is_adapter: bool = False) -> float:
    """Learning rate for a policy of this size, or for an adapter of it. It was tried at 135 million
    parameters, 2e-5; from there it falls with this power of the size.

    >>> rate_for(135_000_000), rate_for(8_000_000_000), rate_for(8_000_000_000, is_adapter=True)
    (2e-05, 2.6e-06, 2.6e-05)
    """
    rate = float(f"{2e-5 * (135e6 / max(1, parameters)) ** power:.2g}")
    rate = min(LARGEST_RATE, max(SMALLEST_RATE, rate))
    return float(f"{LORA_RATES * rate:.2g}") if is_adapter else rate


def interval_for(parameters: int) -> int:
    """Iterations between checkpoints of this many trained parameters.

    >>> interval_for(1_000_000), interval_for(135_000_000)
    (1, 10)
    """
    return 1 if CHECKPOINT_BYTES * parameters < SMALL_CHECKPOINT else 10


LARGEST_RANK = 512
"""Highest rank of an adapter; vLLM takes no higher one."""


class LoraConfig(Settings):
    """A low-rank adapter (Hu et al. 2021), which is trained while the policy's own weights stay."""

    rank: int | None = Field(None, ge=1, le=LARGEST_RANK)
    """Rank of the two factors of each layer. Empty: that of `policy.adapter`, or 32."""
    alpha: float | None = Field(None, gt=0)
    """What the factors add is multiplied by alpha / rank. Empty: that of `policy.adapter`, or twice the
    rank."""
    targets: tuple[str, ...] | None = Field(None, min_length=1)
    """Last parts of the names of the linear layers that get factors, such as q_proj. Empty: those of
    `policy.adapter`, or all linear layers of the blocks."""


class TeacherConfig(Teacher):
    """Another model that teaches beside the rewards, or alone with `train.advantage: none`. One of `model`,
    `url` and `weights` names it. Every token of the policy's vocabulary must have the same id at the
    teacher."""

    model: FilePath | None = None
    """Folder of a Hugging Face causal LM, the name of one that `sf model` has made, or RUN@VERSION: a version
    of the run in the folder RUN. Every training worker needs the folder. It must not change during the run.
    The workers hold the model together."""
    url: Annotated[str, AfterValidator(check_server_url)] | None = None
    """Address of a vLLM server, with `divergence: sampled`. The filter stage asks it for the log-probs of the
    tokens that train. Its key is read from the environment variable SF_TEACHER_KEY."""
    weights: Literal["start"] | None = None
    """start: version 0 of the policy. It holds later versions back. With `train.lora` it takes no memory."""
    tokenizer: FilePath | None = None
    """Folder with the tokenizer of the teacher at `url`."""
    timeout_s: float = Field(600.0, gt=0)
    """Longest time, in seconds, for which the filter stage asks the server at `url` again while it does not
    answer."""

    @model_validator(mode="after")
    def _is_named_once(self) -> TeacherConfig:
        named = [name for name in ("model", "url", "weights") if getattr(self, name) is not None]
        if len(named) != 1:
            given = " and ".join(named) or "none of them"
            raise ValueError(f"one of model, url and weights names the teacher; given: {given}")
        if self.url is not None and self.is_loss:
            raise ValueError(
                "a server at url tells the log-probs of sampled tokens alone: set divergence: sampled, or "
                "name the teacher as model"
            )
        if (self.url is None) != (self.tokenizer is None):
            raise ValueError(
                "url and tokenizer go together: tokenizer is the folder with the tokenizer of the teacher at "
                "url, whose vocabulary is compared with the policy's"
            )
        return self


class TrainConfig(Settings):
    """The optimiser, and how a batch teaches: GRPO (Shao et al. 2024) with DAPO's token mean and bounds,
    unless something else is named."""

    iterations: int = Field(40, ge=1)
    """Number of RL iterations of the run."""
    backend: TrainerName | None = None
    """Code that trains. torch: PyTorch. megatron: Megatron-core, for a policy of model_type llama, qwen2 or
    qwen3; the extra [megatron] of seamlessflow installs it. emulated: trainers sleep as long as the device
    of `emulation` would compute, and make no weights, so `engine.kind` must not be torch. Empty: emulated
    with engines of kind emulated, torch with all others."""
    workers: int = Field(1, ge=1)
    """Number of workers that train together, one rank each."""
    min_workers: int | None = Field(None, ge=1)
    """Fewest training workers to continue with after one is lost. Empty: all of `workers`."""
    tensor_parallel: int = Field(1, ge=1)
    """Number of workers among which the megatron backend splits each layer of the policy."""
    pipeline_parallel: int = Field(1, ge=1)
    """Number of stages, each of as many workers, among which the megatron backend deals out the layers."""
    gang_timeout_s: float = Field(180.0, gt=0)
    """Longest that a rank waits for another one, to start or at an exchange of gradients; then the train step
    fails, names the missing ranks, and is retried. Also the time after which a lost trainer is replaced by
    another worker. The time to read or write a checkpoint, as measured when the run started, comes on
    top."""
    learning_rate: float | None = Field(None, gt=0)
    """Constant learning rate of AdamW, after `warmup_steps`. Empty: with `policy.model`
    2e-5 x sqrt(135 million / N) for N parameters, between 1e-6 and 3e-4. For the built-in policy 3e-4, and
    less above 1.5 million parameters. With `lora` ten times that."""
    warmup_steps: int = Field(0, ge=0)
    """Optimiser steps over which the learning rate rises from 0."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """AdamW's decay rates of the first and the second moment."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's weight decay."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Maximum gradient norm; larger gradients are scaled down to it. 1e9 leaves them as they are."""
    select: AnySelection | None = None
    """Which sessions of a batch train; advantages are made of these alone. Empty: all of them."""
    advantage: AnyAdvantage = Grpo()
    """Advantage of every token, from the rewards."""
    weights: tuple[AnyWeight, ...] = ()
    """What leaves tokens out, or shapes their advantage; one after the other."""
    loss: LossConfig = LossConfig()
    teacher: TeacherConfig | None = None
    """Another model that teaches. Empty: none."""
    lora: LoraConfig | None = None
    """Adapter that is trained in place of the policy's own weights. Empty: all weights are trained."""
    critic: Critic | None = None
    """Network that learns what reward to expect, for `advantage: gae`. Empty: none."""
    max_engine_difference: float = Field(0.1, gt=0)
    """Bound, in nats, on the mean difference between the log-probs that engines report and those that the
    trainer computes with the same weights; a step above it fails. Raise it if `engine.kv_on_update` is keep
    and the difference is that of kept KV."""
    minibatches: int = Field(1, ge=1)
    """Optimiser steps per batch; groups are never split."""
    tokens_per_microbatch: int = Field(8192, ge=64)
    """Maximum number of tokens, padding included, in one forward and backward pass."""
    recompute: bool = False
    """Compute each block of the network again in the backward pass instead of keeping what was within it: a
    third more work, and memory that hardly grows with the number of layers."""
    checkpoint_every: int | None = Field(None, ge=1)
    """Number of iterations between checkpoints. A lost trainer replays the iterations since the newest one
    from stored batches. Empty: 1 for the built-in policy. With `policy.model` 1 below 83 million parameters
    that are trained, where a checkpoint takes less than 1 GB, else 10."""
    keep_checkpoints: int = Field(2, ge=1)
    """Number of newest checkpoints that stay; older ones are removed when another one is complete."""
    keep_weights: int | None = Field(None, ge=1)
    """Number of newest published versions whose weights stay in storage. These stay too: every tenth version,
    those that are evaluated, that `loss.kl` refers to, or that an engine has or loads, and one that is being
    published. Empty: all of them if a version takes less than 50 MB, else 2."""
    keep_every: int | None = Field(None, ge=1)
    """Checkpoints of every this many iterations stay for good. Empty: none."""

    @property
    def rate(self) -> float:
        """The learning rate, that of a small policy if none is given."""
        if self.learning_rate is not None:
            return self.learning_rate
        return rate_for(1, is_adapter=self.lora is not None)

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
