"""Checkpoints: what a trainer needs to continue as if it had never stopped.

Owns a folder of shards and state.json, which is written last and names each shard with its checksum; a folder
without it is no checkpoint. Tensors are float32 under a part and the name of the parameter, as in
`exp_avg/model.norm.weight`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, Field

from storage import files
from storage.files import FileRef
from storage.json_files import parse_json
from storage.tensors.shards import Slice, Slices, read_shards, write_shard

if TYPE_CHECKING:
    import torch

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
