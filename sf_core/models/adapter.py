"""A low-rank adapter (Hu et al. 2021) in PEFT's form: what its folder says of it, and its first factors.

Each of its linear layers NAME gets two factors, `base_model.model.NAME.lora_A.weight` [rank, width in] and
`base_model.model.NAME.lora_B.weight` [width out, rank]. The layer then computes
`W x + alpha / rank * lora_B(lora_A(x))`. This module owns these names and `adapter_config.json`. It
imports torch only where factors or layers are made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sf_core.models.pretrained.needed_weights import build_on_meta_device
from storage.files import join, read_bytes
from storage.json_files import load_json
from storage.tensors.tensor_bytes import find_difference
from storage.tensors.weights import (
    ADAPTER_CONFIG,
    ADAPTER_NAME,
    load_adapter,
    load_weights,
    read_adapter_file,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

_PREFIX = "base_model.model."

_FACTOR = re.compile(rf"{re.escape(_PREFIX)}(?P<layer>.+)\.(?P<factor>lora_[AB])\.weight")


@dataclass(frozen=True, slots=True)
class Adapter:
    """What `adapter_config.json` says of the factors."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    """Last parts of the names of the linear layers that have factors, sorted."""
    base: str = field(default="", compare=False)
    """Folder or name of the model that it was made for, as far as it is known. Others may call that model
    otherwise."""

    @property
    def scale(self) -> float:
        """What the product of the factors is multiplied by."""
        return self.alpha / self.rank

    def encode(self, base: str) -> bytes:
        """The content of `adapter_config.json`. `base`: folder or name of the model that it is for."""
        peft_config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self.rank,
            "lora_alpha": int(self.alpha) if self.alpha == int(self.alpha) else self.alpha,
            "target_modules": list(self.targets),
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }
        return json.dumps(peft_config, indent=2).encode()


# what changes the forward pass beyond two factors, and the value that does not
_UNSUPPORTED = {
    "use_dora": "DoRA",
    "use_rslora": "rank-stabilised scaling (rsLoRA)",
    "modules_to_save": "whole modules in addition to its factors",
    "lora_dropout": "dropout",
    "alpha_pattern": "an alpha for each layer",
    "rank_pattern": "a rank for each layer",
    "lora_bias": "biases of its factors",
    "fan_in_fan_out": "transposed weights",
    "layers_to_transform": "only some of the layers",
    "exclude_modules": "excluded modules",
    "trainable_token_indices": "embeddings of tokens",
    "target_parameters": "parameters that are not linear layers",
    "alora_invocation_tokens": "factors for the tokens after an invocation (aLoRA)",
}

_SUPPORTED_INIT = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the model's own weights as they are. PiSSA and others change
them, and the factors are for the changed ones."""


def read_adapter(folder: str) -> Adapter:
    """What the folder says of its adapter. Raises ValueError, one sentence, if that is not readable, or more
    than two factors for each linear layer."""
    file = join(folder, ADAPTER_CONFIG)
    try:
        peft_config: dict[str, Any] = dict(load_json(read_bytes(file)))
    except (ValueError, TypeError, OSError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from None
    if (kind := peft_config.get("peft_type")) not in (None, "LORA"):
        raise ValueError(f"{file} describes an adapter of kind {kind}; only LoRA is supported")
    if peft_config.get("bias", "none") != "none":
        raise ValueError(
            f"{file} says that biases are trained (bias: {peft_config['bias']}); only adapters without "
            "biases are supported"
        )
    for key, what in _UNSUPPORTED.items():
        if peft_config.get(key):
            raise ValueError(
                f"{file} describes {what} ({key}), which SeamlessFlow cannot train"
                f"{_workaround(peft_config, key)}"
            )
    if (init := peft_config.get("init_lora_weights")) not in _SUPPORTED_INIT:
        raise ValueError(
            f"{file} describes factors for weights that changed when the adapter was made "
            f"(init_lora_weights: {init}): convert the factors, with the argument "
            "path_initial_model_for_weight_conversion of PEFT's save_pretrained"
        )
    try:
        rank = int(peft_config["r"])
        alpha = float(peft_config["lora_alpha"])
        targets = peft_config["target_modules"]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{file} lacks r, lora_alpha or target_modules") from None
    if not isinstance(targets, list):
        raise ValueError(f"{file} names its layers by the pattern {targets!r}; use a list of names instead")
    layers = tuple(sorted({str(target).rpartition(".")[2] for target in targets}))
    return Adapter(rank, alpha, layers, str(peft_config.get("base_model_name_or_path") or ""))


def _workaround(peft_config: Mapping[str, Any], key: str) -> str:
    """How the adapter can be trained all the same, in words."""
    if key == "lora_dropout":
        return "; set lora_dropout to 0 there to train without dropout"
    if key == "use_rslora":
        alpha = float(peft_config.get("lora_alpha", 0)) * float(peft_config.get("r", 0)) ** 0.5
        return f"; set use_rslora to false and lora_alpha to {alpha:g} for the same result"
    return ""


class AdapterVersions:
    """Reads the versions of an adapter as engines are given them, and refuses those that have not the form of
    version 0."""

    def __init__(self, folder: str) -> None:
        """`folder`: that of version 0. Raises ValueError, one sentence, if no adapter can be read there."""
        self.first = read_adapter(folder)
        self._shapes = read_adapter_file(folder)[1].shapes

    def read(self, folder: str) -> bytes:
        """The file with the factors of a version. Raises ValueError, which names the file, if it is damaged,
        or if rank, alpha, layers or shapes are not those of version 0."""
        if (found := read_adapter(folder)) != self.first:
            raise ValueError(
                f"{join(folder, ADAPTER_CONFIG)} describes {_describe(found)}; "
                f"the adapter that the run began with has {_describe(self.first)}"
            )
        content, header = read_adapter_file(folder)
        if fault := find_difference(header.shapes, self._shapes):
            raise ValueError(f"{join(folder, ADAPTER_NAME)}: {fault}")
        return content


def _describe(adapter: Adapter) -> str:
    return f"rank {adapter.rank} and alpha {adapter.alpha:g} for {', '.join(adapter.targets)}"


def list_linears(shape: Mapping[str, Any]) -> dict[str, torch.Size]:
    """Shapes [width out, width in] of the linear layers in the blocks of a model, by their names in
    transformers. `shape`: that of the model, named as in Hugging Face's config.json. No weights are read."""
    from torch import nn

    return {
        f"{block}.{name}": module.weight.shape
        for block, layer in _list_blocks(shape).items()
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear)
    }


def find_weights_outside_linears(shape: Mapping[str, Any]) -> tuple[float, list[str]]:
    """The share of the weights in the blocks of a model of this shape that are in no linear layer, and the
    last parts of their names, those with the most weights first."""
    from torch import nn

    whole = 0
    sizes_outside: dict[str, int] = {}
    for layer in _list_blocks(shape).values():
        reached = {id(m.weight) for m in layer.modules() if isinstance(m, nn.Linear)}
        for name, weight in layer.named_parameters():
            whole += weight.numel()
            if id(weight) not in reached:
                last = name.removesuffix(".weight").rpartition(".")[2]
                sizes_outside[last] = sizes_outside.get(last, 0) + weight.numel()
    names = sorted(sizes_outside, key=lambda name: -sizes_outside[name])
    return sum(sizes_outside.values()) / max(1, whole), names


def _list_blocks(shape: Mapping[str, Any]) -> dict[str, nn.Module]:
    """The blocks of a model of this shape, by their names. They have no memory."""
    model = build_on_meta_device(shape, part=True)
    kinds = model._no_split_modules or ()
    return {name: layer for name, layer in model.named_modules() if type(layer).__name__ in kinds}


def name_factor(layer: str, factor: str) -> str:
    """The name of a linear layer's factor, lora_A or lora_B, in an adapter's file.

    >>> name_factor("model.layers.0.mlp.up_proj", "lora_A")
    'base_model.model.model.layers.0.mlp.up_proj.lora_A.weight'
    """
    return f"{_PREFIX}{layer}.{factor}.weight"


def split_name(name: str) -> tuple[str, str]:
    """The linear layer and the factor that a name in an adapter's file is of. Raises ValueError if it is no
    factor's.

    >>> split_name("base_model.model.model.layers.0.mlp.up_proj.lora_A.weight")
    ('model.layers.0.mlp.up_proj', 'lora_A')
    """
    if (found := _FACTOR.fullmatch(name)) is None:
        raise ValueError(f"the tensor {name} is not a factor of a linear layer")
    return found["layer"], found["factor"]


def shape_factors(adapter: Adapter, linears: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Size]:
    """Shapes of an adapter's factors by their names in its file, for a model with these linear layers. Raises
    ValueError, one sentence, if a target names none of them."""
    from torch import Size

    shapes = {}
    missing = set(adapter.targets)
    for layer, (out, width) in linears.items():
        if (target := layer.rpartition(".")[2]) in adapter.targets:
            missing.discard(target)
            shapes[name_factor(layer, "lora_A")] = Size((adapter.rank, width))
            shapes[name_factor(layer, "lora_B")] = Size((out, adapter.rank))
    if missing:
        known = ", ".join(sorted({layer.rpartition(".")[2] for layer in linears})) or "none"
        raise ValueError(
            f"the target {min(missing)} is not a linear layer of the model's blocks; these layers are {known}"
        )
    return shapes


def make_factors(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    """Factors that change nothing yet, in float32: lora_B is zero, and lora_A uniform within 1 / sqrt(width
    in), as PEFT draws it."""
    import torch

    random = torch.Generator().manual_seed(seed)
    factors = {}
    for name in sorted(shapes):
        factors[name] = torch.zeros(shapes[name])
        if split_name(name)[1] == "lora_A":
            bound = shapes[name][1] ** -0.5
            factors[name].uniform_(-bound, bound, generator=random)
    return factors


def load_merged(base: str, adapter: str, dtype: str) -> dict[str, torch.Tensor]:
    """The weights of a model with an adapter of it, both in folders, as `merge` makes them."""
    import torch

    weights = load_weights(base)
    merge(weights, load_adapter(adapter), read_adapter(adapter).scale, getattr(torch, dtype))
    return weights


def merge(
    weights: dict[str, torch.Tensor], factors: Mapping[str, torch.Tensor], scale: float, dtype: torch.dtype
) -> None:
    """Put what an adapter's factors add into the weights of a model, one after the other: added in float32,
    and rounded once. Weights and factors count as they are computed with, in this dtype. The start stage has
    seen that each layer with factors has a weight (`TrainedAdapter.check_merge`)."""
    for name, up in factors.items():
        layer, factor = split_name(name)
        if factor == "lora_A":
            continue
        parts = (weights[f"{layer}.weight"], up, factors[name_factor(layer, "lora_A")])
        own, up, down = (tensor.to(dtype).float() for tensor in parts)
        weights[f"{layer}.weight"] = (own + scale * (up @ down)).to(dtype)
