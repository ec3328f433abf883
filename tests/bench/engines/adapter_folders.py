"""Adapters of tiny models as a LoRA run has them: the start folder with the adapter of version 0, those of later
versions, and the models that they are, merged in float32."""

from __future__ import annotations

import shutil
from functools import lru_cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from sf_core.models.adapter import (
    Adapter,
    list_linears,
    make_factors,
    name_factor,
    shape_factors,
    split_name,
)
from storage.tensors.weights import save_adapter
from tests.bench.engines.model_folders import ModelFolders

RANK, ALPHA = 4, 6.0


class AdapterFolders:
    """Folders by architecture and version; each is made once. Factors of version 0 change nothing, those of
    others are random, larger from version to version."""

    def __init__(self, root: Path, models: ModelFolders) -> None:
        self._root, self._models = root, models

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
            params, factors = load_file(folder / "model.safetensors"), self.factors(kind, version)
            for layer in {split_name(name)[0] for name in factors}:
                a, b = (factors[name_factor(layer, factor)] for factor in ("lora_A", "lora_B"))
                params[f"{layer}.weight"] += ALPHA / RANK * (b @ a)
            save_file(params, folder / "model.safetensors", {"format": "pt"})
        return str(folder)

    def write(self, folder: Path, kind: str, version: int) -> None:
        """Write a version's adapter into a folder."""
        save_adapter(str(folder), self.factors(kind, version), self.adapter(kind).encode("tiny"), version)

    def adapter(self, kind: str) -> Adapter:
        """An adapter of all linear layers."""
        return Adapter(RANK, ALPHA, tuple(sorted({layer.rpartition(".")[2] for layer in self._linears(kind)})))

    def factors(self, kind: str, version: int) -> dict[str, torch.Tensor]:
        factors = make_factors(shape_factors(self.adapter(kind), self._linears(kind)), seed=version)
        random = torch.Generator().manual_seed(version)
        for name, factor in sorted(factors.items()):
            if split_name(name)[1] == "lora_B":
                factor.normal_(0, 0.1 * version**0.5, generator=random) if version else None
        return factors

    @lru_cache  # noqa: B019
    def _linears(self, kind: str) -> dict[str, torch.Size]:
        return list_linears(self._models(kind))
