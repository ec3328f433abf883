"""The folder that `policy.model` names: where it is, whether a run can start from it, and what it is."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection
from itertools import product
from pathlib import Path
from typing import Any

from sf_core.dataplane.chat.renderer import Renderer, open_renderer
from sf_core.dataplane.chat.template_probes import roles_shown_as_lists
from sf_core.models.images.processor_config import MULTIMODAL_MODEL_TYPES
from sf_core.models.language import VISION_TOWER_PREFIX, language_model
from sf_core.models.pretrained.needed_weights import check_weights, count_language_parameters
from sf_core.models.pretrained.published import PUBLISHED, folder_of, is_gguf
from storage.files import join, list_files, read_bytes
from storage.json_files import load_json
from storage.tensors.weights import open_weights

QUANTISED = ("quantization_config", "compression_config", "quantization")
QUANTISED_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""Where folders say that their weights are quantised; MLX says `quantization`."""

_FULL_ONES = "training needs unquantised weights: name the folder of the original model"

FULL = {"F64", "F32", "F16", "BF16"}
"""Dtypes of weights that are not quantised."""

_MAY_BE_MULTIMODAL = ("policy.model", "train.teacher.model")
"""Settings that may name a model that is shown images."""

_SOME_NAMES = ("model.embed_tokens.weight", f"{VISION_TOWER_PREFIX}patch_embed.proj.weight")
"""Weights that a model has that is shown images."""

SAMPLING = ("ForCausalLM", "LMHeadModel", "WithLMHead", "ForConditionalGeneration")
"""Ends of the names of architectures that sample text."""


def policy_folder(model: str) -> str:
    """The folder that `policy.model` names: a folder by its path, or one that `sf model NAME` has made."""
    named = folder_of(model)
    return str(named) if not Path(model).exists() and "/" not in model and named.is_dir() else model


def check_model_folder(model: str) -> None:
    """Raises ValueError if this is no Hugging Face folder that we can load, or conversations cannot be
    rendered with it."""
    if Path(model, "adapter_config.json").is_file():
        raise ValueError(
            f"policy.model: {model} contains an adapter (adapter_config.json): set policy.model to the "
            "folder of the base model, policy.adapter to this folder, and train.lora to {}"
        )
    check_weights_folder(model, "policy.model")
    try:
        fault = open_renderer(model).find_fault()
    except (ValueError, OSError) as error:
        raise ValueError(f"policy.model: {error}") from None
    if fault is not None:
        raise ValueError(f"policy.model: {model}: {fault}")


def check_weights_folder(model: str, setting: str) -> None:
    """Raises ValueError, which names the setting, if this is no Hugging Face folder with a causal language
    model that we can load."""
    folder = Path(model)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{setting}: {model} {_tell_absence(model, setting)}")
    if (policy := folder / "policy" / "config.json").is_file():
        raise ValueError(f"{setting}: {model} is the directory of a run: set {setting} to {policy.parent}")
    if fault := _fault_of(model, setting):
        raise ValueError(f"{setting}: {fault}")
    for weights in folder.glob("*.safetensors"):
        if not weights.exists():
            raise ValueError(f"{setting}: {weights} is a link to a file that does not exist")
    # by the listing that is copied, which omits hidden files
    if not any(uri.endswith(".safetensors") for uri in list_files(str(folder))):
        raise ValueError(
            f"{setting}: {model} has no *.safetensors file; pickled weights (*.bin, *.pt) are not loaded, "
            "because reading them may run code: save the model with safe_serialization=True"
        )
    try:
        names = open_weights(model)[0].entries.keys()
        dtypes = _unusual_dtypes(model)
    except (ValueError, OSError) as error:
        raise ValueError(f"{setting}: {error}") from None
    if read_model_config(model, setting).get("model_type") in MULTIMODAL_MODEL_TYPES:
        _check_multimodal(model, setting, names)
    if dtypes:
        raise ValueError(f"{setting}: the weights of {model} are quantised ({dtypes}); {_FULL_ONES}")
    check_weights(read_model_config(model, setting), model, setting)


def _check_multimodal(model: str, setting: str, names: Collection[str]) -> None:
    """Raises ValueError if the trainer cannot use a model of MULTIMODAL_MODEL_TYPES with weights of these
    names."""
    from transformers import AutoConfig

    from sf_core.models.decoder import decoder_spec

    if missing := [name for name in _SOME_NAMES if name not in names]:
        raise ValueError(
            f"{setting}: {model} has no {missing[0]}; rename its weights as in Qwen's files: "
            f"model.language_model.* to model.*, and model.{VISION_TOWER_PREFIX}* to {VISION_TOWER_PREFIX}*"
        )
    _, config = language_model(AutoConfig.from_pretrained(model, trust_remote_code=False))
    if decoder_spec(config, 1 << 30) is None:
        raise ValueError(
            f"{setting}: {model} uses sliding windows (use_sliding_window) or scaled positions "
            "(rope_scaling), which training does not support for models that see images: choose another "
            "model"
        )


def _fault_of(model: str, setting: str) -> str | None:
    """Why this kind of model cannot be trained, by what its folder says of it; None if it can."""
    shape = read_model_config(model, setting)
    if method := _find_quantiser(model, shape):
        return f"the weights of {model} are quantised ({method}); {_FULL_ONES}"
    kind = next(iter(shape.get("architectures") or ()), None)
    if shape.get("is_encoder_decoder"):
        problem = f"{kind or 'a model'}, an encoder-decoder model"
    elif kind and not kind.endswith(SAMPLING):
        problem = f"{kind}, which does not generate text"
    elif kind and kind.endswith("ForConditionalGeneration") and not _is_causal(shape, setting):
        problem = f"{kind}, which is not a causal language model in transformers"
    else:
        return None
    named = "a folder of a causal language model (...ForCausalLM in its config.json)"
    seeing = f", or of a model that sees images ({', '.join(MULTIMODAL_MODEL_TYPES)})" * (
        setting in _MAY_BE_MULTIMODAL
    )
    return f"{model} is {problem}: name {named}{seeing}"


def _is_causal(shape: dict[str, Any], setting: str) -> bool:
    """Whether a model continues tokens; only policies and their teachers are shown images."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    seeing = MULTIMODAL_MODEL_TYPES if setting in _MAY_BE_MULTIMODAL else ()
    return shape.get("model_type") in {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *seeing}


def is_quantised(model: str, shape: dict[str, Any]) -> bool:
    """Whether the weights of this model folder are codes of numbers."""
    return _find_quantiser(model, shape) is not None or bool(_unusual_dtypes(model))


def _find_quantiser(model: str, shape: dict[str, Any]) -> str | None:
    for part, key in product((shape, shape.get("text_config") or {}), QUANTISED):
        if settings := part.get(key):
            method = settings.get("quant_method") if isinstance(settings, dict) else None
            return str(method or f"`{key}` in config.json")
    return next((name for name in QUANTISED_FILES if Path(model, name).is_file()), None)


def _unusual_dtypes(model: str) -> str:
    """Dtypes of weights that hold codes of numbers; integers that are no weights may be there."""
    header, _ = open_weights(model)
    dtypes = {entry.dtype for name, entry in header.entries.items() if name.endswith("weight")}
    return ", ".join(sorted(dtypes - FULL))


def _tell_absence(model: str, setting: str) -> str:
    if gguf := next(Path(model).glob("*.gguf"), None):
        return f"contains a GGUF file: `sf model {gguf} DIR` converts it to a folder"
    if is_gguf(model):
        return f"is a GGUF file: `sf model {model} DIR` converts it to a folder"
    if model in PUBLISHED:
        return f"is not on this machine yet: `sf model {model}` downloads it"
    if not Path(model).exists() and os.path.isabs(model):
        return "does not exist; `sf model smollm2` downloads a small model named smollm2"
    if Path(model).exists() or not re.fullmatch(r"\w[\w.-]*/[\w.-]+", model):
        return "is not a Hugging Face model folder (no config.json)"
    folder = model.partition("/")[2]
    return (
        "is not a folder here; to use a model of that name on the Hugging Face hub, run `hf download "
        f"{model} --local-dir {folder}` and set {setting}={folder}"
    )


def read_model_config(folder: str, setting: str = "policy.model") -> dict[str, Any]:
    """The content of a model folder's config.json. Raises ValueError, which names the setting, if it cannot
    be read."""
    file = join(folder, "config.json")
    try:
        return dict(load_json(read_bytes(file)))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{setting}: {file} cannot be read: {error}") from None


def count_parameters(folder: str) -> int:
    """Number of parameters of a model folder that are trained: those that its architecture has, but not those
    of the vision tower of a multimodal policy. A head that is tied to the embedding counts once."""
    return count_language_parameters(read_model_config(folder))


def count_vision_tower(folder: str) -> int:
    """Number of parameters of the vision tower of a multimodal policy; 0 if it does not."""
    header, _ = open_weights(folder)
    return sum(
        math.prod(entry.shape)
        for name, entry in header.entries.items()
        if name.startswith(VISION_TOWER_PREFIX)
    )


def describe_policy(folder: str) -> str:
    """What a policy is, in one line."""
    shape = read_model_config(folder)
    renderer = open_renderer(folder)
    facts = [
        f"{shape.get('model_type')}, {count_parameters(folder) / 1e6:,.0f} million parameters, "
        f"{shape.get('max_position_embeddings', 'unknown')} positions",
        _describe_tools(renderer),
        f"user turns: {renderer.describe_rows('user')}",
        *[f"tool turns: {renderer.describe_rows('tool')}"] * bool(renderer.tool_format),
    ]
    if as_lists := roles_shown_as_lists(renderer.render):
        facts.append(
            f"its chat template writes the text of some messages ({', '.join(as_lists)}) as a Python list, "
            "[{'type': 'text', ...}], here and in vLLM, which its base model has never seen"
        )
    end = f"its chat template ends turns with {renderer.template_stop}, so answers end there too"
    return "; ".join([*facts, *[end] * (renderer.template_stop is not None)])


def _describe_tools(renderer: Renderer) -> str:
    tools = f"its chat template shows {'' if renderer.shows_tools else 'no '}tools"
    if not renderer.tool_format:
        return f"{tools} and writes tool calls in an unknown format, so requests with tools are refused"
    hidden = "" if renderer.shows_tools else ", so no prompt contains them"
    return f"{tools}{hidden}, and calls are read as {renderer.tool_format}"
