"""Published weights: model.safetensors of a policy version, or several files with an index, in a form that
transformers and vLLM load; or an adapter, as PEFT and vLLM load it.

Owns names and metadata of the files. Knows nothing of the model's shape.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import BaseModel, Field

from storage import files
from storage.files import FileRef
from storage.json_files import parse_json
from storage.tensors.tensor_bytes import Entry, Header, TensorBytes, Tensors, pack, parse, read_header

if TYPE_CHECKING:
    import numpy as np
    import torch

FILE_NAME = "model.safetensors"
DIGEST = "digest"
"""Key of the metadata for `TensorBytes.digest` of the tensors."""

INDEX_NAME = "model.safetensors.index.json"
ADAPTER_NAME = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
PICKLES = ("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt", "*.pkl")
"""Patterns of files that may run code when they are read. We read none of them."""

WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", *PICKLES)
"""Patterns of the files of a Hugging Face folder that are not needed for its tokenizer."""


FILE_BYTES = 5_000_000_000
"""Larger weights are stored in several files."""


class _Index(BaseModel):
    metadata: dict[str, Any] = {}
    # only files of this folder: a forged index must not make us read others
    weight_map: dict[str, Annotated[str, Field(pattern=r"^[\w.-]+\.safetensors$")]]


FIRST_NAMES = (FILE_NAME, INDEX_NAME, ADAPTER_NAME)
"""Names of the file that tells which weights a folder has."""


def has_weights(folder: str) -> bool:
    """Whether the folder holds complete weights; their content is checked only when they are loaded."""
    return any(files.exists(files.join(folder, name)) for name in FIRST_NAMES)


def remove_weights(folder: str) -> None:
    # these first: weights that are removed in part are none
    for name in FIRST_NAMES:
        files.remove(files.join(folder, name))
    files.remove_folder(folder)


def save_weights(
    folder: str, tensors: Mapping[str, torch.Tensor], version: int, dtype: str | None = None
) -> list[FileRef]:
    """Write the weights into the folder, in this dtype of torch or their own. No more than single tensors are
    copied in memory."""
    from storage.tensors.torch_bytes import TorchTensors

    return save_tensors(folder, _as_version(TorchTensors(tensors, dtype), version))


def save_adapter(
    folder: str, factors: Mapping[str, torch.Tensor], config: bytes, version: int, dtype: str | None = None
) -> list[FileRef]:
    """Write an adapter into the folder: its factors, in this dtype of torch or their own, and the content of
    its `adapter_config.json`. The first file returned tells which weights these are."""
    about = files.write_atomic(files.join(folder, ADAPTER_CONFIG), config)
    return [save_packed(files.join(folder, ADAPTER_NAME), pack_weights(factors, version, dtype)), about]


def pack_weights(tensors: Mapping[str, torch.Tensor], version: int, dtype: str | None = None) -> TensorBytes:
    """A copy of the weights as `save_weights` stores them."""
    from storage.tensors.torch_bytes import TorchTensors

    return _as_version(pack(TorchTensors(tensors, dtype)), version)


AnyTensors = TypeVar("AnyTensors", bound=Tensors)


def _as_version(tensors: AnyTensors, version: int) -> AnyTensors:
    """The weights with version and digest, which tell readers whether they have them already."""
    tensors.header.metadata.update({"version": str(version), DIGEST: tensors.digest()})
    return tensors


def save_tensors(folder: str, tensors: Tensors) -> list[FileRef]:
    """Write weights into the folder, each file atomically: model.safetensors, or several files of at most
    FILE_BYTES, unless a tensor is larger, and their index. The first file returned tells which weights these
    are."""
    headers, index = _files(tensors)
    refs = []
    for name, header in headers.items():
        uri = files.join(folder, name)
        with files.writer(uri) as file:
            for piece in _pieces(header, tensors):
                file.write(piece)
        refs.append(file.ref(uri))
    if not index:
        files.remove(files.join(folder, INDEX_NAME))  # of another try at this version, as below
        return refs
    refs.insert(0, files.write_atomic(files.join(folder, INDEX_NAME), index))
    files.remove(files.join(folder, FILE_NAME))
    return refs


def first_file(tensors: Tensors) -> Iterator[bytes | memoryview]:
    """The content of the first file that `save_tensors` returns."""
    headers, index = _files(tensors)
    if index:
        yield index
    else:
        yield from _pieces(headers[FILE_NAME], tensors)


def _files(tensors: Tensors) -> tuple[dict[str, Header], bytes]:
    """The headers of the files by name, and the content of their index if there are several."""
    whole = tensors.header
    if whole.data_bytes <= FILE_BYTES:
        return {FILE_NAME: whole}, b""
    parts: list[dict[str, Entry]] = []
    room = 0
    for name, entry in whole.entries.items():
        num_bytes = entry.data_offsets[1] - entry.data_offsets[0]
        if num_bytes > room:
            parts.append({})
            room = FILE_BYTES
        begin = FILE_BYTES - room
        parts[-1][name] = replace(entry, data_offsets=(begin, begin + num_bytes))
        room -= num_bytes
    names = [f"model-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)]
    # what readers must know before they read a file stands in the index
    metadata = {key: value for key, value in whole.metadata.items() if key != DIGEST}
    headers = {name: Header(metadata, part) for name, part in zip(names, parts, strict=True)}
    index = {
        "metadata": {"total_size": whole.data_bytes, **dict(sorted(whole.metadata.items()))},
        "weight_map": {name: file for file, header in headers.items() for name in header.entries},
    }
    return headers, json.dumps(index, indent=2).encode()


def _pieces(header: Header, tensors: Tensors) -> Iterator[bytes | memoryview]:
    yield header.encode()
    for name in header.entries:
        yield tensors.words(name).view("u1").data


def save_packed(uri: str, tensors: TensorBytes) -> FileRef:
    """Write a safetensors file, atomically."""
    with files.writer(uri) as file:
        file.write(tensors.header.encode())
        file.write(tensors.data)
    return file.ref(uri)


def save_arrays(uri: str, arrays: Mapping[str, np.ndarray], version: int) -> FileRef:
    """Write model.safetensors from NumPy arrays, without torch."""
    from safetensors.numpy import save

    uri = files.join(uri, FILE_NAME)
    return save_packed(uri, parse(uri, save(dict(arrays), {"format": "np", "version": str(version)})))


def load_weights(folder: str) -> dict[str, torch.Tensor]:
    """Tensors of the folder on the CPU. Raises ValueError, one sentence, if they are missing or corrupt."""
    uris = _find_files(folder)[0]
    return {key: tensor for uri in uris for key, tensor in read_tensors(uri).items()}


def load_adapter(folder: str) -> dict[str, torch.Tensor]:
    """The factors in the folder of an adapter by the names in its file, in its dtype, on the CPU. Raises
    ValueError as `read_adapter_file`."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    content, _ = read_adapter_file(folder)
    try:
        return load(content)
    except SafetensorError as error:
        uri = files.join(folder, ADAPTER_NAME)
        raise ValueError(f"{uri}: not a complete safetensors file: {error}") from None


def read_adapter_file(folder: str) -> tuple[bytes, Header]:
    """The file with an adapter's factors, and what its header says. Raises ValueError, one sentence, if it is
    missing, corrupt, or not what was written."""
    uri = files.join(folder, ADAPTER_NAME)
    if (content := files.read_if_there(uri)) is None:
        raise ValueError(f"{uri}: no such file")
    tensors = parse(uri, content)
    digest = tensors.digest()
    if tensors.header.metadata.get(DIGEST, digest) != digest:
        raise ValueError(f"{uri}: the tensors differ from those that were written")
    return content, tensors.header


def open_weights(folder: str) -> tuple[Header, Iterator[bytes]]:
    """The tensors of the folder as one file would have them: its header, and the data behind it, read piece
    by piece. Raises ValueError, one sentence, if files are missing or cut off."""
    uris, metadata = _find_files(folder)
    whole = Header({}, {})
    for uri in uris:
        try:
            with files.open_read(uri) as file:
                header = read_header(uri, file)
        except FileNotFoundError:
            raise ValueError(f"{uri}: no such file") from None
        if both := header.entries.keys() & whole.entries.keys():
            raise ValueError(
                f"{uri}: the file has the tensor {min(both)!r}, which another file of the folder also has"
            )
        before = whole.data_bytes
        for name, entry in header.entries.items():
            begin, end = entry.data_offsets
            whole.entries[name] = replace(entry, data_offsets=(before + begin, before + end))
        whole.metadata.update(header.metadata)
    whole.metadata.update(metadata)
    return whole, _data(uris)


def _data(uris: Iterable[str]) -> Iterator[bytes]:
    for uri in uris:
        with files.open_read(uri) as file:
            read_header(uri, file)
            yield from files.pieces(file)


def _find_files(folder: str) -> tuple[list[str], dict[str, str]]:
    """The files with the weights of a folder, and metadata of all of them."""
    uri = files.join(folder, INDEX_NAME)
    if (text := files.read_if_there(uri)) is None:
        is_adapter = files.exists(files.join(folder, ADAPTER_NAME))
        return [files.join(folder, ADAPTER_NAME if is_adapter else FILE_NAME)], {}
    index = parse_json(_Index, text, f"{uri}: no index of weights")
    names = sorted(set(index.weight_map.values()))
    # others write numbers too
    metadata = {key: value for key, value in index.metadata.items() if isinstance(value, str)}
    return [files.join(folder, name) for name in names], metadata


def read_tensors(uri: str) -> dict[str, torch.Tensor]:
    """Tensors of a safetensors file, also under the names of tied ones."""
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
