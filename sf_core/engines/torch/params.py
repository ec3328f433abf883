"""Parameters by Hugging Face name, read one at a time and copied to the device.

The factors of an adapter's versions. They are small, so each version is read whole.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from safetensors import safe_open
from safetensors.torch import load

from sf_core.models.adapter import AdapterVersions, split_name
from storage.tensors.tensor_bytes import find_difference
from storage.tensors.weights import FILE_NAME


class CopiedParams(Mapping[str, torch.Tensor]):
    """Each is copied when it is asked for, so that a model is made of them with room for little more than
    itself, and no tensor shares memory with the file, which may change later."""

    def __init__(
        self,
        shapes: dict[str, torch.Size],
        read: Callable[[str], torch.Tensor],
        dtype: torch.dtype,
        device: torch.device,
        check: Callable[[], None],
    ) -> None:
        """`check` is called before each of them, and raises what shall end the making of a model."""
        self.shapes = shapes
        self.dtype = dtype
        self.device = device
        self._read = read
        self._check = check

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self.shapes:
            raise KeyError(name)
        self._check()
        return self._read(name).to(self.device, self.dtype, copy=True)

    def __contains__(self, name: object) -> bool:
        return name in self.shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def read_params(
    folder: str,
    shapes: dict[str, torch.Size],
    *,
    dtype: torch.dtype,
    device: torch.device,
    check: Callable[[], None],
) -> CopiedParams:
    """The parameters in a local folder. Raises ValueError if their names and shapes are not these."""
    file = safe_open(os.path.join(folder, FILE_NAME), "pt")
    found = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    if fault := find_difference(found, shapes):
        raise ValueError(f"the weights belong to another model: {fault}")
    return CopiedParams(shapes, file.get_tensor, dtype, device, check)


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
