"""Published weights: one model.safetensors per policy version, in a form that transformers and vLLM load.

Owns the name and metadata of the file, and tied tensors. Knows nothing of the model's shape.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, Field, ValidationError

from storage import files
from storage.files import FileRef
from storage.json_files import first_fault

if TYPE_CHECKING:
    import numpy as np
    import torch

FILE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt", "*.pkl")
"""Patterns of files that may run code when they are read. We read none of them."""

WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", *PICKLES)
"""Patterns of the files of a Hugging Face folder that are not needed for its tokenizer."""


class _Index(BaseModel):
    # only files of this folder: a forged index must not make us read others
    weight_map: dict[str, Annotated[str, Field(pattern=r"^[\w.-]+\.safetensors$")]]


def save_weights(uri: str, tensors: Mapping[str, torch.Tensor], version: int) -> FileRef:
    """Write model.safetensors into the folder, atomically."""
    return write_tensors(files.join(uri, FILE_NAME), tensors, {"format": "pt", "version": str(version)})


def save_arrays(uri: str, arrays: Mapping[str, np.ndarray], version: int) -> FileRef:
    """Write model.safetensors from NumPy arrays, without torch."""
    from safetensors.numpy import save

    metadata = {"format": "np", "version": str(version)}
    return files.write_atomic(files.join(uri, FILE_NAME), b"".join(_in_order(save(dict(arrays), metadata))))


def load_weights(uri: str) -> dict[str, torch.Tensor]:
    """Tensors of the folder on the CPU, also if a Hugging Face folder is split into several files. Raises
    ValueError with one sentence if they are missing or corrupt."""
    index = files.join(uri, INDEX_NAME)
    if not files.exists(index):
        return read_tensors(files.join(uri, FILE_NAME))
    try:
        names = sorted(set(_Index.model_validate_json(files.read_bytes(index)).weight_map.values()))
    except ValidationError as error:
        raise ValueError(f"{index}: no index of weights: {first_fault(error)}") from None
    return {key: tensor for name in names for key, tensor in read_tensors(files.join(uri, name)).items()}


def write_tensors(uri: str, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str]) -> FileRef:
    """Write a safetensors file. Tied tensors are stored once, under their first name; the other names are in
    the metadata. Equal tensors give equal bytes."""
    from safetensors.torch import save

    stored: dict[str, torch.Tensor] = {}
    first_name: dict[tuple[object, ...], str] = {}
    metadata = dict(metadata)
    for name, tensor in tensors.items():
        memory = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and first_name.setdefault(memory, name) != name:
            metadata[name] = first_name[memory]
        else:
            stored[name] = tensor.detach().cpu().contiguous()
    with files.writer(uri) as file:
        for part in _in_order(save(stored, metadata)):
            file.write(part)
    return file.ref(uri)


def _in_order(content: bytes) -> tuple[bytes, bytes, memoryview]:
    """Parts of a safetensors file with its metadata sorted, because the library's order varies: 8 bytes of
    length, the header, the data."""
    data = memoryview(content)
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(bytes(data[8:end]))
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little"), text, data[end:]


def read_tensors(uri: str) -> dict[str, torch.Tensor]:
    """Inverse of write_tensors, for any safetensors file."""
    from safetensors import SafetensorError, safe_open

    try:
        with files.local_copy(uri) as path, safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
    except FileNotFoundError:
        raise ValueError(f"{uri}: no such file") from None
    except SafetensorError as error:
        raise ValueError(f"{uri}: not a complete safetensors file: {error}") from None
    tied = {name: tensors[first] for name, first in metadata.items() if first in tensors}
    return tensors | tied
