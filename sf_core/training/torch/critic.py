"""The critic beside the policy: a second model of the same ranks, in the same checkpoints and never
published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from sf_core.recipes.losses import Critic
from sf_core.training.packing.rows import Row
from sf_core.training.packing.trie import Microbatch
from sf_core.training.torch.trained_model import AdamSettings, TrainedModel
from storage.tensors.checkpoints import PARTS, Slice, Slices

_PREFIX = "critic."
"""Before the names of its parameters in checkpoints."""


class PolicyAndCritic:
    """Both models as one, in checkpoints and at rest."""

    def __init__(self, policy: TrainedModel, critic: TrainedModel | None) -> None:
        self._models = {"": policy} | ({} if critic is None else {_PREFIX: critic})

    def is_finite(self) -> bool:
        return all(model.is_finite() for model in self._models.values())

    @property
    def slices_by_name(self) -> dict[str, Slice]:
        return {
            f"{key}{name}": p
            for key, model in self._models.items()
            for name, p in model.slices_by_name.items()
        }

    def slices(self, parts: Sequence[str]) -> Slices:
        slices = {}
        for key, model in self._models.items():
            for path, tensor in model.slices(parts).items():
                part, _, name = path.partition("/")
                slices[f"{part}/{key}{name}"] = tensor
        return slices

    def load(self, tensors: Mapping[str, torch.Tensor], optimizer_steps: int) -> None:
        for key, model in self._models.items():
            names = [(part, name) for part in PARTS for name in model.slices_by_name]
            own = {f"{part}/{name}": tensors[f"{part}/{key}{name}"] for part, name in names}
            model.load(own, optimizer_steps)

    def rest(self) -> None:
        for model in self._models.values():
            model.rest()

    def wake(self) -> None:
        for model in self._models.values():
            model.wake()


def train_critic(
    critic: TrainedModel,
    settings: Critic,
    shares: Sequence[Microbatch],
    rows: Sequence[Row],
    adam: AdamSettings,
) -> tuple[float, list[torch.Tensor]]:
    """One optimiser step of the critic on these rows, of which `shares` is this rank's part; returns the norm
    that the gradient had, and the loss of each token of that part."""
    total = float(sum(row.weights[row.loss_mask].sum(dtype=np.float64) for row in rows)) or 1.0
    losses: list[torch.Tensor] = []

    def loss(microbatch: Microbatch, values: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        of_tokens = microbatch.weights * settings(values, microbatch.values, microbatch.returns)
        losses.append(of_tokens.detach())
        return of_tokens.sum() / total

    critic.forward_backward(shares, loss)
    return critic.update(adam), losses if critic.measures else []


def explained_variance(rows: Sequence[Row]) -> float:
    """Share of the variance of returns that the values at the start of the step say beforehand; NaN if all
    returns are equal, or there are none."""
    parts = [
        (row.returns[row.loss_mask], row.values[row.loss_mask])
        for row in rows
        if row.returns is not None and row.values is not None
    ]
    if not parts:
        return float("nan")
    returns, values = (np.concatenate(column).astype(np.float64) for column in zip(*parts, strict=True))
    variance = returns.var() if returns.size else 0.0
    return float(1 - (returns - values).var() / variance) if variance else float("nan")
