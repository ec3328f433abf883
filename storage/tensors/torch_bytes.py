"""Tensors of torch as a safetensors file holds them. The one place that knows both names of a dtype."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from storage.tensors.tensor_bytes import Entry, Header, Tensors, as_words

_DTYPES = {
    "I64": torch.int64,
    "F64": torch.float64,
    "F32": torch.float32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I16": torch.int16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""In the order in which the safetensors library puts tensors into a file."""
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ORDER = {dtype: number for number, dtype in enumerate(_NAMES)}


def entry_of(tensor: torch.Tensor, begin: int, dtype: torch.dtype | None = None) -> Entry:
    """The entry of a tensor, in this dtype, whose bytes begin here."""
    dtype = dtype or tensor.dtype
    return Entry(_NAMES[dtype], tuple(tensor.shape), (begin, begin + tensor.numel() * dtype.itemsize))


def bytes_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The bytes of a tensor in the order of the file. Shares its memory where this lies so on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    # of no or one element it may have any stride, with which torch does not change the dtype
    flat = flat.as_strided(flat.shape, (1,))
    array: npt.NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return array


def tensor_of(data: npt.NDArray[np.uint8], dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor that has these bytes, and shares their memory. Raises KeyError if torch lacks the dtype."""
    return torch.from_numpy(data.reshape(-1)).view(_DTYPES[dtype]).reshape(shape)


class TorchTensors(Tensors):
    """Tensors that stay where they are: each is converted and copied when its bytes are asked for. Tied ones
    are stored once, under their first name; the other names are in the metadata. Equal tensors give equal
    files, those that the safetensors library would write."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], dtype: str | None = None) -> None:
        """`dtype`: that of torch in which tensors of floating point are stored; by default their own."""
        self._dtype = None if dtype is None else getattr(torch, dtype)
        self._tensors: dict[str, torch.Tensor] = {}
        first_name: dict[tuple[object, ...], str] = {}
        tied = {}
        for name, tensor in tensors.items():
            memory = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if tensor.numel() and first_name.setdefault(memory, name) != name:
                tied[name] = first_name[memory]
            else:
                self._tensors[name] = tensor
        self.header = Header({"format": "pt", **tied}, {})
        ordered = sorted(self._tensors, key=lambda name: (_ORDER[self._choose_dtype(name)], name))
        end = 0
        for name in ordered:
            entry = entry_of(self._tensors[name], end, self._choose_dtype(name))
            self.header.entries[name] = entry
            end = entry.data_offsets[1]

    def words(self, name: str) -> npt.NDArray[Any]:
        tensor = self._tensors[name].detach().to(self._choose_dtype(name))
        return as_words(self.header.entries[name], bytes_of(tensor))

    def _choose_dtype(self, name: str) -> torch.dtype:
        """The dtype in which a tensor is stored."""
        own = self._tensors[name].dtype
        return self._dtype if self._dtype is not None and own.is_floating_point else own
