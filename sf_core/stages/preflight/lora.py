"""The adapter that a run trains: by its settings, or by the folder that they name."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from sf_core.config import RunConfig
from sf_core.config.train_config import LARGEST_RANK, LoraConfig
from sf_core.models.adapter import (
    Adapter,
    read_adapter,
    shape_factors,
    split_name,
)
from sf_core.training.policy_folder import FULL
from storage.files import exists, join
from storage.tensors.tensor_bytes import find_difference
from storage.tensors.weights import ADAPTER_CONFIG, ADAPTER_NAME, open_weights

DEFAULT_RANK = 32


@dataclass(frozen=True, slots=True)
class TrainedAdapter:
    """The adapter that a run trains, as it begins."""

    adapter: Adapter
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of the factors, by their names in the adapter's file."""
    source: str | None
    """Folder that it is copied from; None if it is made."""

    @property
    def parameters(self) -> int:
        """Number of parameters that are trained."""
        return sum(map(math.prod, self.shapes.values()))

    def check_merge(self, stored: Collection[str]) -> None:
        """Raises ValueError, one sentence, if the adapter could not be merged in the end. `stored`: the names
        of the tensors in the model's files."""
        for name in self.shapes:
            if (weight := f"{split_name(name)[0]}.weight") not in stored:
                raise ValueError(
                    f"train.lora: the files of policy.model have no {weight}, so the adapter cannot be "
                    "merged into them: leave train.lora out"
                )

    def describe(self) -> dict[str, Any]:
        """What manifests say of it."""
        of_its_form = {"rank": self.adapter.rank, "alpha": self.adapter.alpha}
        return of_its_form | {"targets": [*self.adapter.targets], "parameters": self.parameters}

    def explain(self) -> str:
        """What is trained in place of the weights, in words."""
        adapter = self.adapter
        made = "made anew"
        if self.source is not None:
            made = f"as {self.source} has it" + (f", made for {adapter.base}" if adapter.base else "")
        return (
            f"{self.parameters:,} parameters are trained, factors of rank {adapter.rank} "
            f"(alpha {adapter.alpha:g}) of {', '.join(adapter.targets)}; {made}"
        )


def find_adapter(config: RunConfig, linears: Mapping[str, tuple[int, ...]]) -> TrainedAdapter:
    """The adapter with which a run of `train.lora` begins, on a policy with these linear layers. Raises
    ValueError, one sentence, if settings, `policy.adapter` and the policy do not go together."""
    lora = config.train.lora
    folder = config.policy.adapter
    assert lora is not None
    if folder is None:
        return shape_adapter(_choose(lora, linears), linears, "train.lora")
    return _read(lora, folder, linears)


def _choose(lora: LoraConfig, linears: Mapping[str, tuple[int, ...]]) -> Adapter:
    targets = lora.targets or {layer.rpartition(".")[2] for layer in linears}
    if not targets:
        raise ValueError("train.lora: the blocks of policy.model have no linear layers; leave train.lora out")
    rank = lora.rank or DEFAULT_RANK
    return Adapter(rank, lora.alpha or 2.0 * rank, tuple(sorted({*targets})))


def shape_adapter(
    adapter: Adapter, linears: Mapping[str, tuple[int, ...]], setting: str, source: str | None = None
) -> TrainedAdapter:
    """This adapter on a policy with these linear layers. Raises ValueError, which names the setting, if a
    target is none of them."""
    try:
        shapes = shape_factors(adapter, linears)
    except ValueError as error:
        raise ValueError(f"{setting}: {error}") from None
    return TrainedAdapter(adapter, shapes, source)


def _read(lora: LoraConfig, folder: str, linears: Mapping[str, tuple[int, ...]]) -> TrainedAdapter:
    for name in (ADAPTER_CONFIG, ADAPTER_NAME):
        if not exists(join(folder, name)):
            raise ValueError(f"policy.adapter: {folder} does not contain an adapter: {name} is missing")
    try:
        adapter = read_adapter(folder)
        header, _ = open_weights(folder)
    except (ValueError, OSError) as error:
        raise ValueError(f"policy.adapter: {error}") from None
    if not 1 <= adapter.rank <= LARGEST_RANK:
        raise ValueError(f"policy.adapter: {folder} has rank {adapter.rank}; expected 1 to {LARGEST_RANK}")
    if not adapter.alpha:
        raise ValueError(f"policy.adapter: {folder} has alpha 0, so its factors change nothing")
    if codes := sorted({entry.dtype for entry in header.entries.values()} - FULL):
        raise ValueError(
            f"policy.adapter: {folder} has quantised factors ({', '.join(codes)}); training needs "
            "unquantised factors"
        )
    for name in ("rank", "alpha", "targets"):
        given = getattr(lora, name)
        own = getattr(adapter, name)
        if given is not None and (tuple(sorted({*given})) if name == "targets" else given) != own:
            raise ValueError(
                f"train.lora.{name} {_text(given)} differs from {_text(own)} of policy.adapter: leave "
                f"train.lora.{name} out"
            )
    found = shape_adapter(adapter, linears, "policy.adapter", folder)
    if fault := find_difference(header.shapes, found.shapes):
        raise ValueError(f"policy.adapter: {folder} was made for another model than policy.model: {fault}")
    return found


def _text(value: Any) -> str:
    return ", ".join(value) if isinstance(value, tuple) else f"{value:g}"
