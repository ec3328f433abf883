"""Adapters of tiny models as a run has them: the start folder with the adapter of version 0, those of later
versions, and the models that they make, merged in float32."""

from __future__ import annotations

import shutil
from functools import lru_cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from sf_core.models.adapter import (
    Adapter,
    make_factors,
    name_factor,
    shape_factors,
    split_name,
)
from storage.tensors.weights import save_adapter
from tests.bench.engines.model_folders import ModelFolders, linears_of

RANK = 4
ALPHA = 6.0


def merge(
    params: dict[str, torch.Tensor], factors: dict[str, torch.Tensor], scale: float
) -> dict[str, torch.Tensor]:
    """The parameters with the factors in them."""
    merged = {**params}
    for layer in {split_name(name)[0] for name in factors}:
        down, up = (factors[name_factor(layer, factor)] for factor in ("lora_A", "lora_B"))
        merged[f"{layer}.weight"] = params[f"{layer}.weight"] + scale * (up @ down)
    return merged


class AdapterFolders:
    """Folders by architecture and version; each is made once. Factors of version 0 change nothing, those of
    others are random, larger from version to version."""

    def __init__(self, root: Path, models: ModelFolders) -> None:
        self._root = root
        self._models = models

    def start(self, kind: str) -> str:
        """The model's folder, in which `adapter` is the adapter's."""
        folder = self._root / kind / "start"
        if not folder.exists():
            shutil.copytree(self._models(kind), folder)
            self.write(folder / "adapter", kind, 0)
        return str(folder)

    def version(self, kind: str, version: int) -> str:
        """The adapter's folder."""
        if version == 0:
            return f"{self.start(kind)}/adapter"
        folder = self._root / kind / f"v{version:05d}"
        if not folder.exists():
            self.write(folder, kind, version)
        return str(folder)

    def merged(self, kind: str, version: int) -> str:
        """A model's folder whose weights are those of the start folder with the factors in them."""
        folder = self._root / kind / f"merged{version}"
        if not folder.exists():
            shutil.copytree(self._models(kind), folder)
            params = load_file(folder / "model.safetensors")
            merged = merge(params, self.factors(kind, version), ALPHA / RANK)
            save_file(merged, folder / "model.safetensors", {"format": "pt"})
        return str(folder)

    def write(self, folder: Path, kind: str, version: int) -> None:
        """Write a version's adapter into a folder."""
        save_adapter(str(folder), self.factors(kind, version), self.adapter(kind).encode("tiny"), version)

    def adapter(self, kind: str) -> Adapter:
        """An adapter of all linear layers."""
        return Adapter(
            RANK, ALPHA, tuple(sorted({layer.rpartition(".")[2] for layer in self._linears(kind)}))
        )

    def factors(self, kind: str, version: int) -> dict[str, torch.Tensor]:
        factors = make_factors(shape_factors(self.adapter(kind), self._linears(kind)), seed=version)
        random = torch.Generator().manual_seed(version)
        ups = [factor for name, factor in factors.items() if split_name(name)[1] == "lora_B"]
        for factor in ups if version else ():
            factor.normal_(0, 0.1 * version**0.5, generator=random)
        return factors

    @lru_cache  # noqa: B019
    def _linears(self, kind: str) -> dict[str, torch.Size]:
        return linears_of(self._models(kind))
