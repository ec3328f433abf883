"""Teachers: how another model teaches at the states that the policy visits (on-policy distillation)."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from sf_core.recipes.samples import Component, Samples, Score, Values

Divergence = Literal["reverse", "forward", "sampled"]


class Teacher(Component):
    """The teacher's term in the loss or in the advantages (GKD, Agarwal et al. 2024, with lambda 1)."""

    divergence: Divergence = "reverse"
    """Divergence between teacher and policy that training minimises. reverse: KL(policy || teacher), as a
    loss over the whole vocabulary. forward: KL(teacher || policy), as a loss over the whole vocabulary.
    sampled: for each sampled token, the teacher's log-prob minus the policy's log-prob is added to the
    advantage (MiniLLM, Gu et al. 2024; Thinking Machines 2025)."""
    coefficient: float = Field(1.0, gt=0)
    """Weight of the teacher relative to `train.advantage`. With `advantage: none` the weight has little
    effect, because the step size of AdamW hardly depends on the size of the gradient."""
    discount: float = Field(0.0, ge=0, le=1)
    """Discount per token, for `divergence: sampled`. The advantage of a token includes the log-prob
    differences of later tokens of the row; the difference n tokens later is multiplied by this discount to
    the power of n. 0: the advantage includes only the difference of the token itself. 1: later differences
    are not discounted (MiniLLM, R_t)."""

    @model_validator(mode="after")
    def _has_an_effect(self) -> Teacher:
        if self.discount and self.is_loss:
            raise ValueError(f"leave `discount` out: it has no effect with `divergence: {self.divergence}`")
        return self

    @property
    def is_loss(self) -> bool:
        """Whether it teaches by a loss over the vocabulary, which a trainer makes of both models."""
        return self.divergence != "sampled"

    @property
    def needs(self) -> frozenset[Score]:
        return frozenset() if self.is_loss else frozenset({"start", "teacher"})

    def __call__(self, samples: Samples) -> Values:
        """What a sampled divergence adds to the advantage of every token; 0 where none is trained:

            coefficient * sum over u >= t of discount ** (u - t) * (teacher_u - start_u)

        over the trained tokens u of the row, where both are log-probs. The policy's is the trainer's own at
        the start of the step: a teacher that is the policy adds exactly 0."""
        rewards_of_rows = []
        rows = zip(samples.scores["teacher"], samples.scores["start"], samples.masks, strict=True)
        for teacher, start, mask in rows:
            gains = teacher[mask].astype(np.float64) - start[mask]
            for token in range(len(gains) - 2, -1, -1) if self.discount else ():
                gains[token] += self.discount * gains[token + 1]
            added = np.zeros(len(mask), np.float32)
            added[mask] = self.coefficient * gains
            rewards_of_rows.append(added)
        return rewards_of_rows
