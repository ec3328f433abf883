"""Weights of tokens, which `train.weights` lists: the parts that take or shape a token's share in the update.

A token of weight 0 is left out, of the mean too. One of advantage 0 stays in the mean and teaches nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from sf_core.recipes.advantages import Advantage, check_values
from sf_core.recipes.samples import Component, Samples, Score, Values
from sf_core.recipes.teachers import Teacher
from sf_core.settings import Reference, load_object, or_kind


class Weight(Component):
    def __call__(self, samples: Samples, advantages: Values) -> tuple[Values, Values]:
        """Factors of the weights of every token, and the advantages from now on."""
        raise NotImplementedError


class Overlong(Weight):
    """Excludes sessions whose last answer was cut off by the token limit or by the context length (overlong
    filtering; DAPO, Yu et al. 2025, section 3.4; SRPO, Zhang et al. 2025)."""

    kind: Literal["overlong"] = "overlong"
    effect: Literal["advantage", "weight"] = "weight"
    """Effect on the tokens of the excluded sessions. weight: the tokens do not count in the mean of the loss.
    advantage: the tokens count in the mean, with advantage 0."""

    def __call__(self, samples: Samples, advantages: Values) -> tuple[Values, Values]:
        return _exclude_sessions(samples.truncated, self.effect, samples, advantages)


class Unparsed(Weight):
    """Excludes sessions that failed because the policy wrote a tool call that could not be parsed."""

    kind: Literal["unparsed"] = "unparsed"
    effect: Literal["advantage", "weight"] = "weight"
    """Effect on the tokens of the excluded sessions. weight: the tokens do not count in the mean of the loss.
    advantage: the tokens count in the mean, with advantage 0."""

    def __call__(self, samples: Samples, advantages: Values) -> tuple[Values, Values]:
        failed = np.array([status == "unparsed_call" for status in samples.statuses])
        return _exclude_sessions(failed, self.effect, samples, advantages)


class Fresh(Weight):
    """Excludes tokens whose lag exceeds `max_lag`, for example tokens sampled before a long interruption. The
    other tokens of the session are used for training."""

    kind: Literal["fresh"] = "fresh"
    max_lag: int = Field(1, ge=0)
    """Maximum lag of the tokens that are used for training, in policy versions."""

    def __call__(self, samples: Samples, advantages: Values) -> tuple[Values, Values]:
        fresh = [samples.iteration - versions <= self.max_lag for versions in samples.versions]
        return [f.astype(np.float32) for f in fresh], advantages


class Surprising(Weight):
    """Only the tokens with the highest entropy are used for training (Wang et al. 2025, "Beyond the
    80/20 rule")."""

    kind: Literal["surprising"] = "surprising"
    share: float = Field(0.2, gt=0, le=1)
    """Share of the batch's tokens that are used for training."""

    @property
    def needs(self) -> frozenset[Score]:
        return frozenset({"entropy"})

    def __call__(self, samples: Samples, advantages: Values) -> tuple[Values, Values]:
        entropies = samples.scores["entropy"]
        tokens = samples.select_trained(entropies)
        least = np.quantile(tokens, 1 - self.share) if tokens.size else 0.0
        return [(row >= least).astype(np.float32) for row in entropies], advantages


class EntropyConfidence(Weight):
    """Multiplies the advantage of each token by 1 + strength * z, where z measures the uncertainty of the
    policy. z is the standard score of the token's entropy plus the standard score of one minus the token's
    probability, clipped to the range from -2 to 2. This is the update of ECHO (arXiv 2602.02150), with the
    probability of the sampled token as confidence."""

    kind: Literal["entropy_confidence"] = "entropy_confidence"
    strength: float = Field(0.1, gt=0, lt=0.5)
    """Strength of the change: the advantage of a token is multiplied by 1 + strength * z. z measures the
    uncertainty of the policy and is between -2 and 2."""

    @property
    def needs(self) -> frozenset[Score]:
        return frozenset({"entropy", "start"})

    def __call__(self, samples: Samples, advantages: Values) -> tuple[Values, Values]:
        surprise = [1 - np.exp(row) for row in samples.scores["start"]]
        of_entropy = _standardize(samples, samples.scores["entropy"])
        of_surprise = _standardize(samples, surprise)
        changed = []
        for advantage, entropy_score, surprise_score in zip(advantages, of_entropy, of_surprise, strict=True):
            factor = 1 + self.strength * np.clip(entropy_score + surprise_score, -2, 2)
            changed.append((advantage * factor).astype(np.float32))
        return ones(samples), changed


class Gated(Weight):
    """Multiplies the advantage of each token by 1 + tanh(strength * d), a factor between 0 and 2. d is the
    rise of the reward that the critic predicts: the prediction after the token minus the prediction before
    the token. This is the gate of HABC (arXiv 2606.17043), with the sign of the advantage. Needs
    `train.advantage: gae`."""

    kind: Literal["gated"] = "gated"
    strength: float = Field(1.0, gt=0)
    """Strength of the gate: the advantage of a token is multiplied by 1 + tanh(strength * d), where d is the
    reward that the critic predicts after the token, minus the reward that the critic predicts before the
    token."""

    @property
    def needs(self) -> frozenset[Score]:
        return frozenset({"values"})

    def __call__(self, samples: Samples, advantages: Values) -> tuple[Values, Values]:
        changed = []
        for values, mask, advantage in zip(samples.scores["values"], samples.masks, advantages, strict=True):
            rises = np.zeros(len(mask), np.float32)
            rises[np.flatnonzero(mask)[:-1]] = np.diff(values[mask])
            factor = 1 + np.tanh(self.strength * rises)
            changed.append((advantage * factor).astype(np.float32))
        return ones(samples), changed


class CustomWeight(Weight):
    """A Python function of your own."""

    kind: Literal["custom"] = "custom"
    function: Reference
    """Name of a Python function, as package.module:name. The function takes Samples (sf_core.recipes.samples)
    and the advantages, and returns one array per row, with a factor for the weight of each token. The factors
    must not be negative. The function runs on the workers."""

    def __call__(self, samples: Samples, advantages: Values) -> tuple[Values, Values]:
        source = f"train.weights {self.function}"
        factors = check_values(load_object(self.function)(samples, advantages), samples, source)
        if any((row < 0).any() for row in factors):
            raise ValueError(f"{source}: a weight is negative")
        return factors, advantages


AnyWeight = Annotated[
    Overlong | Unparsed | Fresh | Surprising | EntropyConfidence | Gated | CustomWeight,
    Field(discriminator="kind"),
    or_kind("overlong"),
]


def weigh(
    samples: Samples, advantage: Advantage, weights: Iterable[Weight], teacher: Teacher | None = None
) -> tuple[Values, Values]:
    """The advantage and the weight of every token; 0 and 1 where none is trained."""
    advantages = advantage(samples)
    factors = ones(samples)
    if teacher is not None and not teacher.is_loss:
        # no deviation of rewards scales what the teacher says
        pairs = zip(advantages, teacher(samples), strict=True)
        advantages = [np.add(own, added, dtype=np.float32) for own, added in pairs]
    for weight in weights:
        more, advantages = weight(samples, advantages)
        factors = [a * b for a, b in zip(factors, more, strict=True)]
    masked_advantages = []
    masked_factors = []
    for row_advantages, row_factors, mask in zip(advantages, factors, samples.masks, strict=True):
        masked_advantages.append(np.where(mask, row_advantages, 0).astype(np.float32))
        masked_factors.append(np.where(mask, row_factors, 1).astype(np.float32))
    return masked_advantages, masked_factors


def ones(samples: Samples) -> Values:
    """A factor of 1 for every token."""
    return [np.ones(len(mask), np.float32) for mask in samples.masks]


def _exclude_sessions(
    sessions: npt.NDArray[np.bool_], effect: str, samples: Samples, advantages: Values
) -> tuple[Values, Values]:
    """Leave out these sessions [S]: their tokens, or only what these teach."""
    factors = samples.spread(np.where(sessions, 0.0, 1.0))
    if effect == "weight":
        return factors, advantages
    return ones(samples), [value * factor for value, factor in zip(advantages, factors, strict=True)]


def _standardize(samples: Samples, values: Values) -> Values:
    """Standard scores of the values among those of all trained tokens; 0 if all of these are equal."""
    tokens = samples.select_trained(values)
    scale = np.float32(tokens.std()) if tokens.size else np.float32(0)
    if not scale:
        return [np.zeros_like(row) for row in values]
    mean = np.float32(tokens.mean())
    return [(row - mean) / scale for row in values]
