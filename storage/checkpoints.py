"""Checkpoints: what a trainer needs to continue as if it had never stopped.

Owns a folder of model.safetensors, optimizer.safetensors and state.json. state.json is written last and holds
the checksums of the other two; a folder without it is no checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from storage import files, weights
from storage.files import FileRef
from storage.json_files import first_fault

if TYPE_CHECKING:
    import torch

MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    model: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    """State dictionary of a torch.optim.Optimizer."""
    state: dict[str, Any]
    """Other state of the trainer; JSON."""


_TensorFile = Literal["model.safetensors", "optimizer.safetensors"]


class _Written(BaseModel):
    bytes: int
    sha256: str


class _Optimizer(BaseModel):
    param_groups: list[dict[str, Any]]
    scalars: dict[str, dict[str, Any]]


class _Content(BaseModel):
    """Content of state.json."""

    state: dict[str, Any]
    optimizer: _Optimizer
    files: dict[_TensorFile, _Written] = Field(min_length=2)


def save_checkpoint(
    uri: str, model: Mapping[str, torch.Tensor], optimizer: Mapping[str, Any], state: Mapping[str, Any]
) -> list[FileRef]:
    """Write the state dictionaries of a model and a torch.optim.Optimizer, and further state as JSON."""
    import torch

    tensors: dict[str, torch.Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for key, values in optimizer["state"].items():
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{key}/{name}"] = value
            else:
                scalars.setdefault(str(key), {})[name] = value
    refs = [
        weights.write_tensors(files.join(uri, MODEL), model, {"format": "pt"}),
        weights.write_tensors(files.join(uri, OPTIMIZER), tensors, {"format": "pt"}),
    ]
    content = {
        "state": dict(state),
        "optimizer": {"param_groups": optimizer["param_groups"], "scalars": scalars},
        "files": {
            name: {"bytes": ref.bytes, "sha256": ref.sha256}
            for name, ref in zip((MODEL, OPTIMIZER), refs, strict=True)
        },
    }
    return [*refs, files.write_atomic(files.join(uri, STATE), json.dumps(content, indent=2).encode())]


def has_checkpoint(uri: str) -> bool:
    """Whether the folder holds a complete checkpoint; its content is checked only when it is loaded."""
    return files.exists(files.join(uri, STATE))


def remove_checkpoint(uri: str) -> None:
    # state.json first: a checkpoint that is removed in part is none
    files.remove(files.join(uri, STATE))
    files.remove_folder(uri)


def load_checkpoint(uri: str) -> Checkpoint:
    """Raises ValueError with one sentence if the checkpoint is missing, incomplete or corrupt."""
    state_uri = files.join(uri, STATE)
    try:
        content = _Content.model_validate_json(files.read_bytes(state_uri))
    except FileNotFoundError:
        raise ValueError(f"{uri}: no complete checkpoint here (state.json is missing)") from None
    except ValidationError as error:
        raise ValueError(f"{state_uri}: no state of a checkpoint: {first_fault(error)}") from None
    for file, written in content.files.items():
        _check(files.join(uri, file), written)
    groups = content.optimizer.param_groups
    state: dict[Any, dict[str, Any]] = {}
    # torch keys the state by the entries of its groups: numbers, or names of parameters
    keys = {str(key): key for group in groups for key in group["params"]}
    for path, tensor in weights.read_tensors(files.join(uri, OPTIMIZER)).items():
        key, _, name = path.rpartition("/")
        state.setdefault(keys[key], {})[name] = tensor
    for key, values in content.optimizer.scalars.items():
        state.setdefault(keys[key], {}).update(values)
    return Checkpoint(
        model=weights.read_tensors(files.join(uri, MODEL)),
        optimizer={"state": state, "param_groups": groups},
        state=content.state,
    )


def _check(uri: str, expected: _Written) -> None:
    try:
        found = files.describe(uri)
    except FileNotFoundError:
        raise ValueError(f"{uri}: missing from the checkpoint") from None
    if (found.bytes, found.sha256) != (expected.bytes, expected.sha256):
        raise ValueError(
            f"{uri}: {found.bytes} bytes that differ from the {expected.bytes} bytes of the checkpoint"
        )
