"""The factors of an adapter's versions. They are small, so each version is read whole."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from sf_core.engines.torch.params import check_shapes
from sf_core.models.adapter import (
    Adapter,
    list_linears,
    read_adapter,
    read_version,
    shape_factors,
    split_name,
)
from storage.files import local_folder
from storage.tensors.weights import WEIGHT_FILES, load_adapter


@dataclass(frozen=True, slots=True)
class Factors:
    """The factors of one version, on the engine's device."""

    params: dict[str, torch.Tensor]
    """By the name of their linear layer: NAME.lora_A [rank, width in] and NAME.lora_B [width out, rank]."""
    scale: float
    """What their product is multiplied by."""


class Adapters:
    """Reads the versions of the adapter that a run starts from."""

    def __init__(self, model_dir: str, start_dir: str, dtype: torch.dtype, device: torch.device) -> None:
        self._model_dir, self._start_dir = model_dir, start_dir
        self._dtype, self._device = dtype, device

    @cached_property
    def _start(self) -> tuple[Adapter, dict[str, torch.Size]]:
        """The adapter of version 0, and the shapes that its factors have in this model."""
        adapter = read_adapter(self._start_dir)
        return adapter, shape_factors(adapter, list_linears(local_folder(self._model_dir, WEIGHT_FILES)))

    def read(self, folder: str) -> Factors:
        """The factors in the folder of a version. Raises ValueError if they are damaged, or if their rank,
        layers or shapes are not those of version 0 and of the model."""
        first, shapes = self._start
        adapter = read_version(folder, first)
        stored = load_adapter(folder)
        check_shapes({name: factor.shape for name, factor in stored.items()}, shapes)
        params = {
            ".".join(split_name(name)): factor.to(self._device, self._dtype)
            for name, factor in stored.items()
        }
        return Factors(params, adapter.scale)
