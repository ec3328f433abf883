"""The network that a trainer trains, as a function from a microbatch to scores of its tokens. Knows no loss.

Its modules are transformers'. The lean decoder computes in place of their own code where it knows the
architecture. Every parameter is read within the forward pass of the block that has it, or else of the whole,
so that it may be in pieces, or of another dtype, at any other time. A rank that has all of them may hold them
ready instead, for many passes. With an adapter only its factors are trained, beside weights that are frozen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig

from sf_core.models.adapter import Adapter, name_factor, read_adapter, split_name
from sf_core.models.decoder import (
    Attend,
    DecoderSpec,
    Layer,
    decoder_spec,
    fuse_layer,
    norm_and_head,
    rotations,
)
from sf_core.models.language import language_model
from sf_core.models.pretrained.needed_weights import load_model
from sf_core.models.scoring import Target, score
from sf_core.training.packing.attention import RowAttention, rows
from sf_core.training.packing.trie import Microbatch
from sf_core.training.torch.compute_weights import ComputeLayer, ComputeTensors, fuse_through
from sf_core.training.vision_tower import VisionTower, embed
from storage.tensors.weights import load_adapter


class Network:
    """A causal LM from a Hugging Face folder; or an adapter of one that is frozen."""

    def __init__(
        self,
        model_dir: str,
        device: str = "cpu",
        *,
        recompute: bool = False,
        values: bool = False,
        adapter: str | None = None,
        dtype: torch.dtype | Literal["auto"] = torch.float32,
        tower: VisionTower | None = None,
    ) -> None:
        """`recompute`: a backward pass computes each block again instead of keeping what was within it.
        `values`: a linear function of what the head is given, at first 0, takes the place of log-probs.
        `adapter`: the folder of one, whose factors alone are trained, in float32. `dtype`: that of the other
        weights; auto: the one that they are stored in. `tower`: what shows images to it. Raises ValueError,
        one sentence, if the head of the model is given no hidden states, or if only the package peft can
        train an adapter of it and is missing."""
        # the model stays in evaluation mode: dropout would make these log-probs differ from the engine's
        kind, config = language_model(AutoConfig.from_pretrained(model_dir, trust_remote_code=False))
        self.model = load_model(kind, model_dir, config=config, dtype=dtype)
        self.tower = tower
        names = self.model._no_split_modules or ()
        self.blocks = [module for module in self.model.modules() if type(module).__name__ in names]
        spec = decoder_spec(self.model.config, max_length=1 << 30)
        scale = None
        self._has_adapter = adapter is not None
        if adapter is not None:
            self.model.requires_grad_(False)
            # read in any order, while that of parameters decides how sums round and what ranks exchange
            description = read_adapter(adapter)
            factors = dict(sorted(load_adapter(adapter).items()))
            scale = description.scale
            if spec is None:
                _inject_peft_modules(self.model, description, factors)
            else:
                _add_factors(self.model, factors)
        self.model.to(device)
        if spec is None:
            is_last = head_is_last(self.model)
            if values and not is_last:
                raise ValueError(
                    f"train.critic does not support model_type {self.model.config.model_type}: its logits "
                    "are not hidden states times a weight"
                )
            _add_mixin(self.model, _TransformersModel, head_is_last=is_last)
        else:
            _add_mixin(self.model, _LeanModel, spec=spec)
        for block in self.blocks:
            if spec is not None:
                _add_mixin(block, _LeanLayer, spec=spec, scale=scale)
            if recompute:
                _add_mixin(block, _RecomputedBlock)
        if values:
            width = self.model.get_output_embeddings().weight.shape[1]
            _add_mixin(self.model, _ValueModel, value_head=nn.Parameter(torch.zeros(width, device=device)))

    @property
    def is_lean(self) -> bool:
        """Whether the lean decoder runs it."""
        return isinstance(self.model, _LeanModel)

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained, by the names that they have in checkpoints: all of them, or the
        factors of an adapter, as its file names them."""
        named = dict(self.model.named_parameters())
        if not self._has_adapter:
            return named
        return {
            name_factor(*name.removesuffix(_PEFT_SUFFIX).rpartition(".")[::2]): parameter
            for name, parameter in named.items()
            if parameter.requires_grad
        }

    def fuse_frozen(self) -> None:
        """Fuse the weights of each layer of a lean model for all passes to come, and keep them in this form
        alone; factors stay by themselves."""
        for block in self.blocks:
            block.fuse_frozen()

    @contextmanager
    def computing_in(self, dtype: torch.dtype) -> Iterator[None]:
        """Hold the weights of a lean model ready, in the dtype of computing, for all passes of the block. At
        its end the gradients, which backward passes summed in float32, reach the parameters."""
        modules = [self.model, *self.blocks]
        for module in modules:
            module.copy_for_computing(dtype)
        try:
            yield
            for module in modules:
                module.copies.accumulate_gradients()
                # the next module's gradients take the memory of this one's
                module.copies = None
        finally:
            for module in modules:
                module.copies = None

    def scores(self, microbatch: Microbatch, target: Target | None = None) -> tuple[torch.Tensor, ...]:
        """Log-probs [M] of the trained tokens, the entropies [M], and with a target the divergences [M],
        differentiable, as `models.scoring` has them; or their values [M] and zeros. The microbatch must be on
        the network's device."""
        never = None if self.tower is None else self.tower.placeholder
        scores: tuple[torch.Tensor, ...] = self.model(
            self._add_image_features(microbatch), partial(_score, microbatch, target, never)
        )
        return scores

    def outputs(self, microbatch: Microbatch) -> Outputs:
        """What predicts each trained token [M, width], and the weight of the head that makes logits of it;
        None if these are the logits."""
        outputs: Outputs = self.model(self._add_image_features(microbatch), lambda *outputs: outputs)
        return outputs

    def logits(self, microbatch: Microbatch) -> torch.Tensor:
        """[M, vocabulary], one row per trained token: the logits that predict it. Of a large vocabulary they
        take most of the memory."""
        outputs, head = self.model.outputs(self._add_image_features(microbatch))
        return outputs if head is None else F.linear(outputs, head)

    def _add_image_features(self, microbatch: Microbatch) -> Microbatch:
        return microbatch if self.tower is None else self.tower.add_features(microbatch)


Outputs = tuple[torch.Tensor, torch.Tensor | None]


def _score(
    microbatch: Microbatch,
    target: Target | None,
    never: int | None,
    outputs: torch.Tensor,
    head: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    sampling = microbatch.sampling
    ids = microbatch.targets
    how = sampling["temperature"], sampling["top_p"], sampling["top_k"]
    is_fast = microbatch.rule == "distinct"
    return score(outputs, head, ids, *how, target=target, never=never, fast_head=is_fast)


class _PredictingModel(nn.Module):
    """A model as a function from a microbatch to the outputs that predict its tokens."""

    def forward(self, microbatch: Microbatch, then: Callable[..., Any]) -> Any:
        """Apply the function to the outputs while FSDP has the weights gathered."""
        return then(*self.outputs(microbatch))

    def outputs(self, microbatch: Microbatch) -> Outputs:
        raise NotImplementedError


class _ValueModel(_PredictingModel):
    """A model whose scores are values."""

    value_head: nn.Parameter
    """[width]"""

    def forward(self, microbatch: Microbatch, then: Callable[..., Any]) -> Any:
        outputs, _ = self.outputs(microbatch)
        values = outputs.float() @ self.value_head.float()
        return values, torch.zeros_like(values)


class _LeanModel(_PredictingModel):
    """A model of an architecture that the lean decoder knows."""

    spec: DecoderSpec
    model: Any
    """What transformers has below the head."""
    copies: ComputeTensors | None = None

    def copy_for_computing(self, dtype: torch.dtype) -> None:
        self.copies = ComputeTensors(self._weights_outside_layers(), dtype)

    def _weights_outside_layers(self) -> dict[str, torch.Tensor]:
        """Parameters that are in no layer."""
        norm, head = norm_and_head(dict(self.named_parameters()))
        return {"embedding": self.model.embed_tokens.weight, "norm": norm, "head": head}

    def outputs(self, microbatch: Microbatch) -> Outputs:
        outside = self._weights_outside_layers() if self.copies is None else self.copies.tensors
        rotary = rotations(self.spec, microbatch.depths)
        x = embed(microbatch, outside["embedding"])
        attend = RowAttention(microbatch, x.dtype)
        for layer in self.model.layers:
            x = layer(x, rotary, attend)
        x = F.rms_norm(x, x.shape[-1:], eps=self.spec.norm_eps)
        return rows(x, microbatch.positions) * outside["norm"], outside["head"]


class _LeanLayer(nn.Module):
    spec: DecoderSpec
    scale: float | None
    """What the product of factors is multiplied by; None without an adapter."""
    copies: ComputeLayer | None = None
    frozen: Layer | None = None

    def copy_for_computing(self, dtype: torch.dtype) -> None:
        self.copies = ComputeLayer(dict(self.named_parameters()), self.spec, dtype)

    @torch.no_grad()
    def fuse_frozen(self) -> None:
        # as parameters they go with the model to another device, in place
        fused = nn.ParameterList()

        def freeze(tensor: torch.Tensor) -> torch.Tensor:
            fused.append(nn.Parameter(tensor, requires_grad=False))
            return fused[-1]

        self.frozen = fuse_through(dict(self.named_parameters()), self.spec, freeze)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.register_parameter("weight", None)
                module.register_parameter("bias", None)
        self.fused = fused

    def forward(self, x: torch.Tensor, rotary: torch.Tensor, attend: Attend) -> torch.Tensor:
        if self.copies is not None:
            return self.copies.layer(x, rotary, attend)
        parameters = dict(self.named_parameters())
        layer = fuse_layer(parameters.get, self.spec) if self.frozen is None else self.frozen
        if self.scale is not None:
            # as engines are given them: rounded to the dtype of computing
            rounded = {n: p.to(x.dtype) for n, p in parameters.items() if p.requires_grad}
            layer = layer.with_factors(rounded.get, self.scale)
        return layer(x, rotary, attend)


class _TransformersModel(_PredictingModel):
    """A model that transformers' own code runs."""

    head_is_last: bool

    def outputs(self, microbatch: Microbatch) -> Outputs:
        """Run the whole model. Its head is given nothing if it is the last, else the trained positions."""
        trained: list[torch.Tensor] = []

        def select(_: nn.Module, args: tuple[torch.Tensor, ...]) -> torch.Tensor:
            hidden = rows(args[0].flatten(0, 1), microbatch.owners[microbatch.positions])
            trained.append(hidden)
            of_head = hidden[:0] if self.head_is_last else hidden
            return of_head.unsqueeze(0)

        head = self.get_output_embeddings()  # type: ignore[operator]
        with head.register_forward_pre_hook(select):
            transformers_forward: Any = super(_PredictingModel, self).forward
            logits: torch.Tensor = transformers_forward(microbatch.padded_ids, use_cache=False).logits
        if self.head_is_last:
            return trained[0], head.weight
        return logits.squeeze(0), None


class _RecomputedBlock(nn.Module):
    """A block of which only the input is kept for the backward pass."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(super().forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


_PEFT_SUFFIX = ".default.weight"
"""Suffix that peft adds to the name of a factor; `default` is its name of the adapter."""


def _add_factors(model: nn.Module, factors: Mapping[str, torch.Tensor]) -> None:
    """Put factors beside the weights of their linear layers."""
    for name, tensor in factors.items():
        layer, factor = split_name(name)
        model.get_submodule(layer).register_parameter(factor, _make_trainable(tensor))


def _make_trainable(factor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(factor.to(torch.float32, copy=True))


def _inject_peft_modules(model: Any, adapter: Adapter, factors: Mapping[str, torch.Tensor]) -> None:
    """Put modules of peft with factors in the place of their linear layers."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError:
        raise ValueError(
            f"train.lora with a model of model_type {model.config.model_type} needs the package peft, which "
            "this Python does not have: pip install 'seamlessflow[lora]'"
        ) from None
    layers = sorted({split_name(name)[0] for name in factors})
    alpha: Any = adapter.alpha
    inject_adapter_in_model(LoraConfig(r=adapter.rank, lora_alpha=alpha, target_modules=layers), model)
    model.requires_grad_(False).eval()
    for name, tensor in factors.items():
        layer, factor = split_name(name)
        module = model.get_submodule(f"{layer}.{factor}.default")
        module.weight = _make_trainable(tensor)


def _add_mixin(module: nn.Module, kind: type[nn.Module], **attributes: object) -> None:
    """Make a class the first base of the module's class. A function in place of its forward pass would refer
    to the module, which then stays in memory until the garbage collector comes."""
    own = type(module)
    module.__class__ = type(own.__name__, (kind, own), {"__module__": own.__module__})
    for name, value in attributes.items():
        setattr(module, name, value)


@torch.no_grad()
def head_is_last(model: Any) -> bool:
    """Whether a model's logits are hidden states times the weight of its head: some have a bias, or scale or
    cap what the head gives."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        return False
    dtype = head.weight.dtype
    device = head.weight.device
    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    given = torch.linspace(-50, 50, head.out_features, dtype=dtype, device=device)
    with head.register_forward_hook(lambda *_: given.expand(1, 1, -1).clone()):
        logits = model(token, use_cache=False).logits
    return torch.equal(logits.flatten().to(dtype), given)
