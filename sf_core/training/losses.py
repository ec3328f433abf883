"""Losses by the names that `train.loss` gives them, and the metrics beside them. Pure: tensors in, one value
per token out."""

from __future__ import annotations

from typing import Protocol

import torch

from sf_core.config import TrainConfig

MAX_LOG_RATIO = 20.0


class Loss(Protocol):
    def __call__(
        self,
        logprobs: torch.Tensor,
        behaviour_logprobs: torch.Tensor,
        advantages: torch.Tensor,
        settings: TrainConfig,
    ) -> torch.Tensor:
        """Loss of every token [N]; the gradient flows through `logprobs`. The trainer takes their mean,
        weighted by the rows."""
        ...


def ppo_clip(
    logprobs: torch.Tensor,
    behaviour_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    settings: TrainConfig,
) -> torch.Tensor:
    """PPO's clipped surrogate with DAPO's asymmetric clip (Yu et al. 2025). The ratio is to the log-probs
    recorded at sampling, so it corrects for lag and for numerical differences of the engine; as a weight of
    the gradient it is truncated at `importance_cap` (Espeholt et al. 2018):

        ratio * A <= clip(ratio) * A:  -min(ratio, importance_cap) * A, which is its gradient too
        otherwise:                     -clip(ratio) * A, without gradient
    """
    ratio = importance_ratio(logprobs, behaviour_logprobs)
    truncated = ratio * (settings.importance_cap / ratio.detach()).clamp(max=1.0)
    clipped = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    # tested on the untruncated ratio: a cap below 1 + clip_high would be taken for a clip
    is_clipped = ratio * advantages > clipped * advantages
    return -torch.where(is_clipped, clipped, truncated) * advantages


LOSSES: dict[str, Loss] = {"ppo_clip": ppo_clip}


def importance_ratio(logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor) -> torch.Tensor:
    """Probability under the policy over that under the behaviour policy, clamped to stay finite."""
    return (logprobs - behaviour_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


@torch.no_grad()
def divergence(
    logprobs: torch.Tensor,
    behaviour_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    settings: TrainConfig,
) -> dict[str, torch.Tensor]:
    """How far the policy is from the one that sampled, per token [N].

    `kl` is the k3 estimator of KL(behaviour || policy) (Schulman 2020): unbiased and never negative.
    `clipped` marks tokens whose gradient the clip removes.
    """
    ratio = importance_ratio(logprobs, behaviour_logprobs)
    too_high = (ratio > 1.0 + settings.clip_high) & (advantages > 0)
    too_low = (ratio < 1.0 - settings.clip_low) & (advantages < 0)
    return {
        "ratio": ratio,
        "logprob_difference": (logprobs - behaviour_logprobs).abs(),
        "kl": ratio - 1.0 - ratio.log(),
        "clipped": (too_high | too_low).float(),
    }


def entropy(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Entropy [N] in nats of the distributions given by logits [N, V] and temperatures [N], before top-k and
    top-p cut them."""
    logprobs = (logits / temperature.where(temperature > 0, 1.0).unsqueeze(1)).log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)
