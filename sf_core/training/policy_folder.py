"""The folder that `policy.model` names: where it is, whether a run can start from it, and what it is."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

from sf_core.dataplane.chat.renderer import open_renderer
from sf_core.models.gguf_file import is_gguf
from sf_core.models.published import PUBLISHED, named_folder
from storage.files import join, list_files, read_bytes
from storage.tensors.weights import open_weights


def policy_folder(model: str) -> str:
    """The folder that `policy.model` names: a folder by its path, or one that `sf model NAME` has made."""
    named = named_folder(model)
    return str(named) if not Path(model).exists() and "/" not in model and named.is_dir() else model


def check_model_folder(model: str) -> None:
    """Raises ValueError if this is no Hugging Face folder that we can load, or conversations cannot be
    rendered with it."""
    folder = Path(model)
    if not (folder / "config.json").is_file():
        raise ValueError(f"policy.model: {model} {_missing(model)}")
    for weights in folder.glob("*.safetensors"):
        if not weights.exists():
            raise ValueError(f"policy.model: {weights} is a link to a file that is not there")
    # by the listing that is copied, which omits hidden files
    if not any(uri.endswith(".safetensors") for uri in list_files(str(folder))):
        raise ValueError(
            f"policy.model: {model} has no *.safetensors file; pickled weights (*.bin, *.pt) are not loaded, "
            "because reading them may run code: save the model with safe_serialization=True"
        )
    if quantised := read_model_config(model).get("quantization_config"):
        method = quantised.get("quant_method", "by an unknown method")
        raise ValueError(
            f"policy.model: the weights of {model} are quantised ({method}); training needs full ones"
        )
    try:
        open_renderer(model)
    except (ValueError, OSError) as error:
        raise ValueError(f"policy.model: {error}") from None


def _missing(model: str) -> str:
    if is_gguf(model):
        return f"is a GGUF file: `sf model {model} DIR` makes a folder of it"
    if model in PUBLISHED:
        return f"is not on this machine yet: `sf model {model}` fetches it"
    if not Path(model).exists() and os.path.isabs(model):
        return "does not exist; `sf model smollm2` makes a small one, named smollm2"
    if Path(model).exists() or not re.fullmatch(r"\w[\w.-]*/[\w.-]+", model):
        return "is not a Hugging Face model folder (no config.json)"
    folder = model.partition("/")[2]
    return (
        "is no folder here; a model of that name on the Hugging Face hub is downloaded first, by "
        f"`hf download {model} --local-dir {folder}`, and then named as that folder: policy.model={folder}"
    )


def read_model_config(folder: str) -> dict[str, Any]:
    file = join(folder, "config.json")
    try:
        return dict(json.loads(read_bytes(file)))
    except (ValueError, TypeError) as error:
        raise ValueError(f"policy.model: {file} cannot be read: {error}") from None


def count_parameters(folder: str) -> int:
    """Number of parameters of a model folder; a head that is tied to the embedding counts once."""
    header, _ = open_weights(folder)
    is_tied = bool(read_model_config(folder).get("tie_word_embeddings"))
    counted = [entry for name, entry in header.entries.items() if not (is_tied and name == "lm_head.weight")]
    return sum(math.prod(entry.shape) for entry in counted)


def describe_policy(folder: str) -> str:
    """What a policy is, in one line."""
    shape, renderer = read_model_config(folder), open_renderer(folder)
    if not renderer.shows_tools:
        tools = "shows no tools, so the policy cannot call any"
    elif not renderer.tool_format:
        tools = "shows tools, but writes calls in no known format: requests with tools are refused"
    else:
        tools = f"shows tools and writes calls as {renderer.tool_format}"
    return (
        f"{shape.get('model_type')}, {count_parameters(folder) / 1e6:,.0f} million parameters, "
        f"{shape.get('max_position_embeddings', 'unknown')} positions; its chat template {tools}"
    )
