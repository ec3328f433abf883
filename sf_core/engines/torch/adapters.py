"""The factors of an adapter's versions. They are small, so each version is read whole."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from safetensors.torch import load

from sf_core.models.adapter import AdapterVersions, split_name


@dataclass(frozen=True, slots=True)
class Factors:
    """The factors of one version, on the engine's device."""

    params: dict[str, torch.Tensor]
    """Factors of each linear layer NAME: NAME.lora_A [rank, width in] and NAME.lora_B [width out, rank]."""
    scale: float
    """What their product is multiplied by."""


def read_factors(versions: AdapterVersions, folder: str, dtype: torch.dtype, device: torch.device) -> Factors:
    """The factors in the folder of a version. Raises ValueError as `AdapterVersions.read`."""
    stored = load(versions.read(folder))
    params = {".".join(split_name(name)): factor.to(device, dtype) for name, factor in stored.items()}
    return Factors(params, versions.first.scale)
