"""What a trainer has of a policy, whatever holds its parameters: the interface of its models."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from sf_core.config import TrainConfig
from sf_core.config.train_config import PackingRule
from sf_core.models.scoring import Target
from sf_core.training.packing.trie import Microbatch, Packing
from storage.tensors.checkpoints import Slice, Slices

TokenLoss = Callable[..., torch.Tensor]
"""(microbatch, log-probs [M], entropies [M], divergences [M] if there are targets) -> the loss [], whose
gradient flows through all of them."""

Targets = Callable[[Microbatch], Target]
"""What a teacher predicts of a microbatch, which is on the device."""


@dataclass(frozen=True, slots=True)
class AdamSettings:
    """AdamW (Loshchilov & Hutter 2019) and the clipping before it, as one step needs them."""

    learning_rate: float
    betas: tuple[float, float]
    weight_decay: float
    max_grad_norm: float


@torch.no_grad()
def are_finite(tensors: Collection[torch.Tensor]) -> bool:
    """Whether all elements of all tensors are finite. Their norms tell it several times faster, unless one
    overflows."""
    norms = [torch.linalg.vector_norm(tensor) for tensor in tensors]
    if not norms or bool(torch.stack(norms).isfinite().all()):
        return True
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


class DistributedModel(Protocol):
    """A model that the ranks of a gang hold together. Every rank makes the same calls in the same order; they
    raise ExchangeError if another rank is gone."""

    num_shares: int
    """Number of parts into which the rows of an optimiser step are dealt."""
    share: int
    """The part that this rank works on."""
    reads_tries: bool
    """Whether a token that several rows share goes through it once; else it computes all rows, padded."""
    measures: bool
    """Whether this rank's scores of its share count: of the ranks that work on a share, one does."""

    def forward(self, microbatches: Sequence[Microbatch], loss: TokenLoss) -> None:
        """Call the loss with the scores of each microbatch, without a gradient."""
        ...

    def rest(self) -> None:
        """Give the device's memory back; everything waits in the host's."""
        ...

    def wake(self) -> None:
        """Take what waits in the host's memory to the device."""
        ...


def packing_of(config: TrainConfig, model: DistributedModel) -> Packing:
    """How the rows of a step are packed for this model."""
    rule: PackingRule = config.packing if model.reads_tries else "padded"
    return Packing(config.tokens_per_microbatch, rule)


class TeacherModel(DistributedModel, Protocol):
    """A model that may teach by its whole distributions."""

    def predict(self, microbatch: Microbatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What predicts each trained token of a microbatch that is on the device [M, width], and the weight
        of the head that makes logits of it; None if these are the logits."""
        ...


class TrainedModel(DistributedModel, Protocol):
    """A policy in float32, its gradient and Adam's moments."""

    device: torch.device

    def forward_backward(
        self, microbatches: Sequence[Microbatch], loss: TokenLoss, targets: Targets | None = None
    ) -> None:
        """Add the gradient of the sum of the losses of all microbatches of all shares. Every share has as
        many of them; some may train no token."""
        ...

    def update(self, settings: AdamSettings) -> float:
        """Make an optimiser step and set the gradient to zero. Returns the norm that the gradient had; if it
        is not finite, the weights stay."""
        ...

    def is_finite(self) -> bool:
        """Whether all weights that this rank holds are finite."""
        ...

    @property
    def slices_by_name(self) -> Mapping[str, Slice]:
        """What this rank wants of each parameter of a checkpoint, by name."""
        ...

    def slices(self, parts: Sequence[str]) -> Slices:
        """What this rank stores of these PARTS of a checkpoint (storage.tensors.checkpoints), by PART/NAME:
        together the ranks store all of it. Moments exist after the first step."""
        ...

    def load(self, tensors: Mapping[str, torch.Tensor], optimizer_steps: int) -> None:
        """Take the `places` of each parameter and its moments, by PART/NAME, after so many steps."""
        ...

    def as_stored(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What transformers would save, or PEFT of an adapter, made of whole parameters."""
        ...
