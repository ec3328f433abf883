"""Losses: what `train.loss` names. Functions of tensors, by their methods alone, so that settings load
without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from sf_core.recipes.samples import Component, Score
from sf_core.settings import Changeable, Reference, Settings, load_object, or_kind

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0

MAX_LOG_SEQUENCE_RATIO = 10.0


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """M trained tokens: all trained tokens of one or more rows."""

    logprobs: Tensor
    """[M] log-probs under the policy. The gradient flows through them."""
    old: Tensor
    """[M] log-probs under the policy in the denominator of the ratio."""
    advantages: Tensor
    """[M] advantages of the tokens."""
    row: Tensor
    """[M] int64, number of the token's row, from 0."""
    num_rows: int

    @property
    def ratio(self) -> Tensor:
        """[M] probability under the policy over that under the old one, clamped to stay finite."""
        return (self.logprobs - self.old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


class PolicyLoss(Component):
    """The part of the loss that makes tokens with a positive advantage more probable."""

    def __call__(self, tokens: Tokens) -> Tensor:
        """[M] loss of every token."""
        raise NotImplementedError

    def find_bounded(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """[M], [M] bool: the tokens that the lower and the upper bound keep from going further."""
        none = tokens.row != tokens.row
        return none, none

    def fit(self, log_ratios: npt.NDArray[np.float64], advantages: npt.NDArray[np.float64]) -> PolicyLoss:
        """The loss of a step, from the log-ratios [M] and advantages [M] of all its tokens at its start."""
        return self


class Clip(PolicyLoss):
    """PPO's clipped surrogate (Schulman et al. 2017, eq. 7) with separate bounds above and below (DAPO, Yu et
    al. 2025, eq. 8):

        -min(ratio * A, clip(ratio, 1 - low, 1 + high) * A)
    """

    kind: Literal["clip"] = "clip"
    low: float = Field(0.2, gt=0, le=1)
    """Lower clip range: the lower bound of the ratio is 1 - low."""
    high: float = Field(0.28, gt=0)
    """Upper clip range: the upper bound of the ratio is 1 + high."""
    cap: float | None = Field(5.0, ge=1)
    """Upper bound of the ratio for tokens with a negative advantage. Without this cap, the clipped surrogate
    does not bound the ratio of these tokens from above. Empty: no bound."""
    beyond: Literal["truncate", "dual"] = "truncate"
    """Effect of the cap on a token whose ratio is above the cap. truncate: the token keeps its gradient, and
    the cap replaces the ratio as weight (Espeholt et al. 2018). dual: the token has no gradient (dual clip;
    Ye et al. 2020, eq. 5)."""

    def __call__(self, tokens: Tokens) -> Tensor:
        ratio = tokens.ratio
        advantages = tokens.advantages
        clipped = ratio.clamp(1.0 - self.low, 1.0 + self.high)
        # tested on the untruncated ratio: a cap below 1 + high would be taken for a clip
        is_clipped = ratio * advantages > clipped * advantages
        if self.cap is None:
            return -clipped.where(is_clipped, ratio) * advantages
        if self.beyond == "truncate":
            truncated = ratio * (self.cap / ratio.detach()).clamp(max=1.0)
            return -clipped.where(is_clipped, truncated) * advantages
        return -clipped.where(is_clipped, ratio.clamp(max=self.cap)) * advantages

    def find_bounded(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        return _beyond(tokens.ratio, tokens.advantages, 1.0 - self.low, 1.0 + self.high)


class SequenceClip(PolicyLoss):
    """The clipped surrogate with one ratio per row. The ratio of a row is the geometric mean of the ratios of
    its tokens (GSPO, Zheng et al. 2025, eq. 14: the variant with a separate gradient for each token)."""

    kind: Literal["sequence_clip"] = "sequence_clip"
    low: float = Field(3e-4, gt=0, le=1)
    """Lower clip range: the lower bound of the ratio is 1 - low."""
    high: float = Field(4e-4, gt=0)
    """Upper clip range: the upper bound of the ratio is 1 + high."""

    def __call__(self, tokens: Tokens) -> Tensor:
        mean = _row_mean(tokens.logprobs.detach() - tokens.old, tokens)
        # the value is the row's, the gradient is the token's
        log_ratio = mean + tokens.logprobs - tokens.logprobs.detach()
        ratio = log_ratio.clamp(max=MAX_LOG_SEQUENCE_RATIO).exp()
        clipped = ratio.clamp(1.0 - self.low, 1.0 + self.high)
        return -(ratio * tokens.advantages).minimum(clipped * tokens.advantages)

    def find_bounded(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        ratio = _row_mean(tokens.logprobs - tokens.old, tokens).exp()
        return _beyond(ratio, tokens.advantages, 1.0 - self.low, 1.0 + self.high)


class Cispo(PolicyLoss):
    """The negative log-prob of the token times its advantage, weighted by the ratio. The weight has an upper
    bound. Every token keeps its gradient (CISPO; MiniMax-M1, Chen et al. 2025, eq. 4)."""

    kind: Literal["cispo"] = "cispo"
    high: float = Field(0.28, gt=0)
    """Upper clip range: the upper bound of the weight is 1 + high."""

    def __call__(self, tokens: Tokens) -> Tensor:
        weight = tokens.ratio.detach().clamp(max=1.0 + self.high)
        return -weight * tokens.advantages * tokens.logprobs

    def find_bounded(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        low, _ = super().find_bounded(tokens)
        return low, tokens.ratio > 1.0 + self.high


class M2po(PolicyLoss):
    """The clipped surrogate with clip bounds that are computed in each step (M2PO, Zheng et al. 2025). The
    tokens with the largest squared log-ratio are clipped, until the mean squared log-ratio of the remaining
    tokens is at most `budget`. The mean includes only tokens that clipping can affect."""

    kind: Literal["m2po"] = "m2po"
    budget: float = Field(0.04, gt=0)
    """Maximum mean squared log-ratio."""

    @property
    def needs(self) -> frozenset[Score]:
        return frozenset({"start"})

    def fit(self, log_ratios: npt.NDArray[np.float64], advantages: npt.NDArray[np.float64]) -> PolicyLoss:
        can_clip = log_ratios[log_ratios * advantages > 0]
        squares = np.sort(can_clip**2)
        means = np.cumsum(squares) / np.arange(1, squares.size + 1)
        num_kept = int(np.searchsorted(means, self.budget, side="right"))
        if num_kept == squares.size:
            return Clip(low=1.0, high=np.exp(MAX_LOG_RATIO), cap=None)
        bound = 0.0
        if num_kept:
            # between the last that stays and the first that is clipped: at one of them, rounding would decide
            last_kept = np.sqrt(squares[num_kept - 1])
            first_clipped = np.sqrt(squares[num_kept])
            bound = float(last_kept + first_clipped) / 2
        return Clip.model_construct(low=1.0 - np.exp(-bound), high=np.exp(bound) - 1.0, cap=None)

    def __call__(self, tokens: Tokens) -> Tensor:
        raise TypeError("a loss of kind m2po must be fitted to the tokens of a step first")


class Plain(PolicyLoss):
    """The negative log-prob of the token times its advantage, without a ratio (REINFORCE, Williams 1992)."""

    kind: Literal["plain"] = "plain"

    def __call__(self, tokens: Tokens) -> Tensor:
        return -tokens.advantages * tokens.logprobs


class CustomLoss(PolicyLoss):
    """A Python function of your own."""

    kind: Literal["custom"] = "custom"
    function: Reference
    """Name of a Python function, as package.module:name. The function takes Tokens (sf_core.recipes.losses)
    and returns the loss of each token. The function runs on the workers."""

    def __call__(self, tokens: Tokens) -> Tensor:
        loss: Tensor = load_object(self.function)(tokens)
        if loss.shape != tokens.logprobs.shape:
            raise ValueError(
                f"train.loss.policy {self.function}: expected one number for each of {len(tokens.logprobs)} "
                f"tokens, got shape {tuple(loss.shape)}"
            )
        return loss


# the form takes a value for one of the first kind that has all of its fields: those with few come first
AnyPolicyLoss = Annotated[
    Plain | Cispo | M2po | SequenceClip | CustomLoss | Clip, Field(discriminator="kind"), or_kind("clip")
]


class Correction(Settings):
    """Truncated or masked importance sampling: the loss of each token is multiplied by a factor. The factor
    is a ratio of two probabilities of the token: the probability under the policy at the start of the train
    step, divided by the recorded probability. The factor corrects for lag, and for numeric differences
    between engine and trainer."""

    cap: float = Field(2.0, ge=1)
    """Upper bound of the factor by which the loss of a token is multiplied."""
    beyond: Literal["truncate", "mask"] = "truncate"
    """Factor of tokens whose ratio is above `cap`. truncate: the factor is equal to `cap`. mask: the factor
    is 0."""
    level: Literal["token", "row"] = "token"
    """Tokens over which the ratio is computed. token: each token has its own ratio. row: all tokens of a row
    have the same ratio, the product of the ratios of the row's tokens."""

    def __call__(
        self, start: npt.NDArray[np.float32], behaviour: npt.NDArray[np.float32]
    ) -> npt.NDArray[np.float32]:
        """[M] factor of each trained token of a row, from its log-probs [M] under the weights at the start of
        the step, and those recorded at sampling."""
        log_ratio = start.astype(np.float64) - behaviour
        if self.level == "row":
            log_ratio = np.full_like(log_ratio, log_ratio.sum())
        ratio = np.exp(log_ratio.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO))
        beyond = self.cap if self.beyond == "truncate" else 0.0
        return np.where(ratio > self.cap, beyond, ratio).astype(np.float32)


class Kl(Settings):
    """The penalty of a token is an estimate of the divergence at this token, multiplied by `coefficient`
    (estimators: Schulman 2020; their gradients: Tang and Munos 2025, arXiv 2506.09477)."""

    coefficient: float = Field(gt=0)
    """Weight of the penalty."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimate of the divergence at each token, where d is the log-prob under the policy minus the log-prob
    under the reference. k1: d; only for `place: reward`, because in the loss its mean gradient is 0. k2:
    d * d / 2; in the loss its mean gradient is that of KL(policy || reference), for tokens that the policy
    in training sampled. k3: exp(-d) - 1 + d, never negative; in the loss its mean gradient is that of
    KL(reference || policy)."""
    place: Literal["loss", "reward"] = "loss"
    """Place at which the penalty enters. loss: the penalty of each token is added to the loss of the token.
    reward: the penalties of a session are summed, and the sum is subtracted from the reward of the
    session."""
    renew_every: int | None = Field(None, ge=1)
    """Interval, in policy versions, after which the reference is replaced. The reference is the newest
    version whose number is a multiple of this interval. Empty: the reference is always the policy at the
    start of the run."""

    def __call__(self, logprobs: Tensor, reference: Tensor) -> Tensor:
        """[M] estimate for each token."""
        difference = logprobs - reference
        if self.estimator == "k1":
            return difference
        if self.estimator == "k2":
            return difference * difference / 2
        return (-difference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() - 1 + difference

    def version(self, now: int) -> int:
        """Version that is the reference of the step from this version."""
        return 0 if self.renew_every is None else now - now % self.renew_every


class LossConfig(Settings):
    """The loss: the mean of the policy loss over all trained tokens, plus the penalties."""

    policy: AnyPolicyLoss = Clip()
    """Formula that computes the policy loss of every token from the advantage of the token."""
    mean_over: Literal["token", "session", "group", "constant"] = "token"
    """Unit that has equal weight in the mean. token: every token of the batch has the same weight (DAPO).
    session: every session has the same weight, whatever its number of tokens (GRPO). group: every group has
    the same weight, whatever its number of tokens. constant: the loss is summed over the tokens of each
    session, and the sum is divided by `session_tokens` (Dr. GRPO)."""
    session_tokens: int | None = Field(None, ge=1)
    """Number by which the sum of the loss over a session's tokens is divided, for `mean_over: constant`."""
    ratio_to: Literal["behaviour", "step_start"] = "behaviour"
    """Denominator of the ratio in the policy loss. The numerator is the probability of the token under the
    weights in training. behaviour: the probability that was recorded when the token was sampled. step_start:
    the probability under the weights at the start of the train step (decoupled PPO, Hilton et al. 2022),
    which needs an additional forward pass."""
    correction: Correction | None = None
    """Importance sampling, which corrects the loss of each token for lag and numeric differences. Empty: no
    importance sampling."""
    kl: Kl | None = None
    """Penalty on the divergence of the policy from a reference policy. Empty: no penalty, and no reference
    policy."""
    entropy: float = Field(0.0, ge=0)
    """Weight of the entropy bonus: the entropy of the sampling distribution, multiplied by this weight, is
    subtracted from the loss. 0: no entropy bonus."""

    @model_validator(mode="after")
    def _check(self) -> LossConfig:
        if (self.mean_over == "constant") != (self.session_tokens is not None):
            raise ValueError("`mean_over: constant` and session_tokens need each other: set both or neither")
        return self

    @property
    def needs(self) -> frozenset[Score]:
        """Scores that the loss itself takes, beside those of advantages and weights."""
        scores_needed = set(self.policy.needs)
        if self.ratio_to == "step_start" or self.correction is not None:
            scores_needed.add("start")
        if self.kl is not None:
            scores_needed |= {"reference"} if self.kl.place == "loss" else {"reference", "start"}
        return frozenset(scores_needed)

    def reference_of(self, now: int) -> int:
        """Version that is the reference of the step from this version: that of `kl`, else the start."""
        return 0 if self.kl is None else self.kl.version(now)

    @property
    def teaches_all(self) -> bool:
        """Whether tokens of advantage 0 have a gradient too."""
        return self.entropy > 0 or (self.kl is not None and self.kl.place == "loss")


class Critic(Settings):
    """A second network that predicts the reward before each token (actor and critic; Schulman et al. 2017).
    The weights of the critic are never published."""

    learning_rate: Annotated[float, Changeable] = Field(1e-3, gt=0)
    """Learning rate of the AdamW optimiser of the critic. The rate is constant."""
    clip: Annotated[float | None, Changeable] = Field(0.2, gt=0)
    """Maximum change of the predicted reward of a token within a train step. A token whose prediction has
    changed by more than this maximum has no gradient. Empty: no maximum."""

    def __call__(self, values: Tensor, before: Tensor, returns: Tensor) -> Tensor:
        """[M] loss of each token, from its value now and at the start of the step, and its return."""
        error = (values - returns).square()
        if self.clip is not None:
            near = before + (values - before).clamp(-self.clip, self.clip)
            error = error.maximum((near - returns).square())
        return error / 2


def mean_over(
    lengths: npt.NDArray[np.float64], units: Sequence[str] | None, constant: int | None = None
) -> tuple[npt.NDArray[np.float64], float]:
    """A factor [R] for the tokens of each row, and what divides their sum, over the rows of one optimiser
    step, so that the quotient is the mean over units. Exact however rows are packed and dealt.

    `lengths` [R] are sums of the weights of a row's tokens, `units` [R] name what counts once; None: each
    token. With a constant, the sum over a unit is divided by it in the place of the unit's length."""
    if units is None:
        return np.ones(len(lengths)), float(lengths.sum())
    _, unit = np.unique(units, return_inverse=True)
    of_units = np.bincount(unit, weights=lengths)
    if constant is not None:
        return np.ones(len(lengths)), float(constant * len(of_units))
    counts = of_units > 0
    return np.divide(1.0, of_units, where=counts, out=np.zeros_like(of_units))[unit], float(counts.sum())


def _row_mean(values: Tensor, tokens: Tokens) -> Tensor:
    """[M] mean over each token's row."""
    zeros = values.new_zeros(tokens.num_rows)
    sums = zeros.index_add(0, tokens.row, values)
    counts = zeros.index_add(0, tokens.row, values.new_ones(values.shape))
    return (sums / counts.clamp(min=1.0))[tokens.row]


def _beyond(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    return (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0)
