"""Checkpoints, which a trainer needs to continue as if it had never stopped; and the shards in them.

A checkpoint is a folder of shards and state.json, which is written last and names each shard with its
checksum. A folder without state.json is no checkpoint. Tensors are float32 under a part and the name of the
parameter, as in `exp_avg/model.norm.weight`.

A shard is a safetensors file with slices of tensors. Readers may cut the tensors otherwise than the writers
did. Where a slice lies in its tensor stands in the metadata, as torch.distributed.checkpoint writes and reads
it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os import SEEK_END
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from storage import files
from storage.files import FileRef
from storage.json_files import parse_json
from storage.tensors.tensor_bytes import Entry, Header, read_header

if TYPE_CHECKING:
    import torch


SLICES_KEY = "DCP_SHARDING_INFO"
"""Key of the metadata, which torch.distributed.checkpoint has chosen."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Where a slice lies in its tensor."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offset: tuple[int, ...]
    size: tuple[int, ...]
    """Shape of the slice."""

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Slice:
        return cls(shape, (0,) * len(shape), shape)

    @classmethod
    def rows(cls, shape: tuple[int, ...], part: int, parts: int) -> Slice:
        """One of several parts of the first dimension, the last of which may be smaller or empty. A scalar is
        not cut."""
        if not shape:
            return cls.whole(shape)
        step = -(-shape[0] // parts)
        begin = min(shape[0], part * step)
        end = min(shape[0], (part + 1) * step)
        return cls(shape, (begin, *[0] * (len(shape) - 1)), (end - begin, *shape[1:]))

    @property
    def box(self) -> tuple[slice, ...]:
        """Index of the slice in its tensor."""
        return tuple(slice(begin, begin + n) for begin, n in zip(self.offset, self.size, strict=True))

    def intersect(self, other: Slice) -> tuple[slice, ...] | None:
        """Index, in this slice, of what it has in common with another of the same tensor; None if nothing."""
        index = []
        dimensions = zip(self.offset, self.size, other.offset, other.size, strict=True)
        for own_offset, own_size, other_offset, other_size in dimensions:
            begin = max(own_offset, other_offset)
            end = min(own_offset + own_size, other_offset + other_size)
            if begin >= end:
                return None
            index.append(slice(begin - own_offset, end - own_offset))
        return tuple(index)


Slices = Mapping[str, tuple[Slice, "torch.Tensor"]]
"""Slices by the names of their tensors."""


class _SliceInFile(BaseModel):
    saved_offsets: tuple[int, ...]
    shape: tuple[int, ...]


_SLICES_JSON = TypeAdapter(dict[str, _SliceInFile])


def write_shard(uri: str, slices: Slices) -> FileRef:
    """Write slices, one after the other."""
    from storage.tensors.torch_bytes import bytes_of, entry_of

    entries: dict[str, Entry] = {}
    end = 0
    for name, (_, tensor) in slices.items():
        entries[name] = entry_of(tensor, end)
        end = entries[name].data_offsets[1]
    slices_by_name = {name: {"saved_offsets": p.offset, "shape": p.shape} for name, (p, _) in slices.items()}
    header = Header({"format": "pt", SLICES_KEY: json.dumps(slices_by_name)}, entries)
    with files.writer(uri) as file:
        file.write(header.encode())
        for _, tensor in slices.values():
            file.write(bytes_of(tensor).data)
    return file.ref(uri)


def read_shards(
    folder: str, shards: Iterable[FileRef], targets: Mapping[str, Slice]
) -> dict[str, torch.Tensor]:
    """The wanted slices, from those shards of the folder that have a part of them. Each of these is read
    once, and what it holds is used only if it is what was written.

    Raises ValueError, which names a file or the folder, if something is missing or damaged."""
    import torch

    from storage.tensors.torch_bytes import tensor_of

    filled_by_name: dict[str, _SliceBeingRead] = {}
    for shard in shards:
        _read_shard(shard, targets, filled_by_name)
    for name, target in targets.items():
        if 0 not in target.size and (name not in filled_by_name or filled_by_name[name].missing):
            raise ValueError(f"{folder}: the shards lack {name!r} or a part of it")
    full = {
        name: tensor_of(filled.data, filled.dtype, targets[name].size)
        for name, filled in filled_by_name.items()
    }
    return {
        name: full[name] if name in full else torch.empty(target.size) for name, target in targets.items()
    }


@dataclass(slots=True)
class _SliceBeingRead:
    """A wanted slice on its way."""

    dtype: str
    data: npt.NDArray[np.uint8]
    """Its bytes; the last dimension is that of an element's."""
    missing: int
    """Number of elements that no shard had yet."""


def _read_shard(
    shard: FileRef, targets: Mapping[str, Slice], filled_by_name: dict[str, _SliceBeingRead]
) -> None:
    try:
        with files.open_read(shard.uri) as opened:
            if (size := opened.seek(0, SEEK_END)) != shard.bytes:
                raise ValueError(f"{shard.uri}: has {size} bytes, but {shard.bytes} bytes were written")
            opened.seek(0)
            file: Any = files.HashedFile(opened)
            header = read_header(shard.uri, file)
            stored_slices = _stored_slices(shard.uri, header)
            if not any(
                [
                    _has_part(shard.uri, name, stored_slices[name], targets[name])
                    for name in stored_slices.keys() & targets.keys()
                ]
            ):
                return
            for name, entry in header.entries.items():
                data = file.read(entry.data_offsets[1] - entry.data_offsets[0])
                if name in targets:
                    _fill(shard.uri, name, entry, stored_slices[name], targets[name], data, filled_by_name)
    except FileNotFoundError:
        raise ValueError(f"{shard.uri}: is missing") from None
    if file.ref(shard.uri) != shard:
        raise ValueError(f"{shard.uri}: the content differs from what was written")


def _stored_slices(uri: str, header: Header) -> dict[str, Slice]:
    """Offsets of every slice in the file. Raises ValueError if an offset is missing."""
    try:
        described = _SLICES_JSON.validate_json(header.metadata.get(SLICES_KEY, ""))
        slices_by_name = {
            name: Slice(described[name].shape, described[name].saved_offsets, entry.shape)
            for name, entry in header.entries.items()
        }
    except (ValidationError, KeyError):
        raise ValueError(f"{uri}: not a shard: the offsets of its slices are missing") from None
    end = 0
    for name, entry in header.entries.items():
        stored = slices_by_name[name]
        if (
            entry.data_offsets[0] != end
            or len({len(stored.shape), len(stored.offset), len(stored.size)}) != 1
        ):
            raise ValueError(f"{uri}: not a shard: {name!r} has no valid offsets")
        end = entry.data_offsets[1]
    return slices_by_name


def _has_part(uri: str, name: str, stored: Slice, target: Slice) -> bool:
    if stored.shape != target.shape:
        raise ValueError(
            f"{uri}: {name!r} belongs to a tensor of shape {[*stored.shape]}; expected {[*target.shape]}"
        )
    return stored.intersect(target) is not None


def _fill(
    uri: str,
    name: str,
    entry: Entry,
    stored_slice: Slice,
    target: Slice,
    data: bytes,
    filled_by_name: dict[str, _SliceBeingRead],
) -> None:
    """Copy what a slice in a file shares with the wanted one."""
    width, rest = divmod(len(data), max(1, math.prod(stored_slice.size)))
    if name not in filled_by_name:
        room = np.empty((*target.size, width), np.uint8)
        filled_by_name[name] = _SliceBeingRead(entry.dtype, room, math.prod(target.size))
    filled = filled_by_name[name]
    if rest or entry.dtype != filled.dtype or (data and width != filled.data.shape[-1]):
        raise ValueError(f"{uri}: {name!r} has another dtype than the rest of its tensor")
    source = stored_slice.intersect(target)
    box = target.intersect(stored_slice)
    if source is not None and box is not None:
        stored = np.frombuffer(data, np.uint8).reshape(*stored_slice.size, width)
        filled.data[box] = stored[source]
        filled.missing -= math.prod(index.stop - index.start for index in box)


STATE = "state.json"

MASTER, EXP_AVG, EXP_AVG_SQ = PARTS = ("master", "exp_avg", "exp_avg_sq")
"""The weights that are trained, and Adam's two moments of them."""

_LOOK_S = (0.02, 1.0)
"""First and longest time between looks for the shards of others."""


class CheckpointFile(BaseModel):
    """A file of a checkpoint."""

    bytes: int
    sha256: str


class TrainerProgress(BaseModel):
    """State of a trainer beside its tensors."""

    version: int = Field(ge=0)
    optimizer_steps: int = Field(ge=0)
    base: str = ""
    """Digest of the frozen weights that an adapter was trained for; empty, and not stored, if it is none."""


class _State(TrainerProgress):
    """Content of state.json."""

    shards: dict[Annotated[str, Field(pattern=r"^shard-\d+-of-\d+\.safetensors$")], CheckpointFile] = Field(
        min_length=1
    )


def save_shard(
    folder: str, slices: Slices, rank: int, ranks: int, progress: TrainerProgress, patience_s: float
) -> None:
    """Store the slices of one rank, by PART/NAME. Rank 0 then waits for those of the others, for at most
    `patience_s`, and completes the checkpoint.

    No rank may call it before an earlier try to store this checkpoint is over on all ranks. Raises
    TimeoutError, which names a shard that did not come."""
    shard = write_shard(files.join(folder, _shard(rank, ranks)), slices)
    written = CheckpointFile(bytes=shard.bytes, sha256=shard.sha256)
    if rank:
        files.write_atomic(
            files.join(folder, _description_file(rank, ranks)), written.model_dump_json().encode()
        )
        return
    shards = {_shard(0, ranks): written}
    deadline = time.monotonic() + patience_s
    for other in range(1, ranks):
        description = files.join(folder, _description_file(other, ranks))
        shards[_shard(other, ranks)] = CheckpointFile.model_validate_json(_await(description, deadline))
    state = _State(**progress.model_dump(), shards=shards)
    content = state.model_dump_json(indent=2, exclude_defaults=True)
    files.write_atomic(files.join(folder, STATE), content.encode())


def _shard(rank: int, ranks: int) -> str:
    return f"shard-{rank + 1}-of-{ranks}.safetensors"


def _description_file(rank: int, ranks: int) -> str:
    """Name of the file by which a rank says that its shard is written."""
    return f"shard-{rank + 1}-of-{ranks}.json"


def _await(uri: str, deadline: float) -> bytes:
    pause_s, longest_s = _LOOK_S
    while (content := files.read_if_there(uri)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{uri}: this checkpoint was not written in time and does not exist")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)
    return content


def has_checkpoint(uri: str) -> bool:
    """Whether the folder holds a complete checkpoint; its content is checked only when it is loaded."""
    return files.exists(files.join(uri, STATE))


def remove_checkpoint(uri: str) -> None:
    # state.json first: a checkpoint that is removed in part is none
    files.remove(files.join(uri, STATE))
    files.remove_folder(uri)


def load_checkpoint(
    uri: str, targets: Mapping[str, Slice]
) -> tuple[dict[str, torch.Tensor], TrainerProgress]:
    """Slices of the parameters with these names, each in its PARTS, by PART/NAME, and the rest of the state.

    Raises ValueError with one sentence if the checkpoint is missing, incomplete or corrupt."""
    state_uri = files.join(uri, STATE)
    if (text := files.read_if_there(state_uri)) is None:
        raise ValueError(f"{uri}: no complete checkpoint here (state.json is missing)")
    state = parse_json(_State, text, f"{state_uri}: no state of a checkpoint")
    shards = [FileRef(files.join(uri, name), file.bytes, file.sha256) for name, file in state.shards.items()]
    slices: dict[str, Slice] = {}
    for part in PARTS:
        slices |= {f"{part}/{name}": target for name, target in targets.items()}
    progress = TrainerProgress(**state.model_dump(exclude={"shards"}))
    return read_shards(uri, shards, slices), progress
