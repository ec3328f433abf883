"""A lean forward pass for the Llama family: Llama, Mistral, Qwen2, Qwen3 (dense). One definition serves
generation, with a cache, and training, with gradients. Loads and saves nothing; names are Hugging Face's.

RMSNorm weights are multiplied into the projection that follows; q, k and v are one projection, gate and up
are one; rotary pairs are made neighbours by reordering weight rows, so that a rotation is a complex product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from sf_core.models.projections import PLAIN, AddProject, Project, Projections

Params = Mapping[str, torch.Tensor]
"""Parameters by their Hugging Face names."""

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(q [N, heads, head_dim], k and v [N, kv_heads, head_dim]) -> [N, heads * head_dim] over N tokens."""

AttendIn = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""The same in a layer, given by its number."""


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """What the parameters do not show; biases, qk-norm and tied embeddings are read from the parameters."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    inv_freq: torch.Tensor
    """[head_dim / 2], angle per position of each rotary pair."""
    rope_scaling: float
    """Factor on the rotated queries and keys (YaRN); 1 otherwise."""


def decoder_spec(config: Any, max_length: int) -> DecoderSpec | None:
    """The spec of a Hugging Face config, or None if this module cannot run it up to max_length tokens."""
    if config.model_type not in ("llama", "mistral", "qwen2", "qwen3"):
        return None
    window = getattr(config, "sliding_window", None)
    rope = config.rope_parameters
    if (
        config.hidden_act != "silu"
        or getattr(config, "mlp_bias", False)
        or (window is not None and window < max_length)
        or rope["rope_type"] not in ("default", "linear", "llama3", "yarn")
        or rope.get("partial_rotary_factor", 1.0) != 1.0
    ):
        return None
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    inv_freq, rope_scaling = _rope(config, head_dim)
    return DecoderSpec(
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        head_dim,
        config.rms_norm_eps,
        inv_freq,
        rope_scaling,
    )


def _rope(config: Any, head_dim: int) -> tuple[torch.Tensor, float]:
    rope = config.rope_parameters
    if rope["rope_type"] == "default":
        return 1.0 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2) / head_dim), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))


@dataclass(frozen=True, slots=True)
class Layer:
    """Fused parameters of a layer, differentiable in those that they were fused from."""

    spec: DecoderSpec
    qkv: Project
    qk_norm: torch.Tensor | None
    """[heads + kv_heads, head_dim]"""
    out: AddProject
    gated: Project
    down: AddProject

    def __call__(self, x: torch.Tensor, rotations: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Hidden states [N, hidden] after the layer."""
        spec, width = self.spec, x.shape[-1:]
        heads = self.qkv(F.rms_norm(x, width, eps=spec.norm_eps)).view(x.shape[0], -1, spec.head_dim)
        num_qk = spec.num_heads + spec.num_kv_heads
        qk, v = heads[:, :num_qk], heads[:, num_qk:]
        if self.qk_norm is not None:
            qk = F.rms_norm(qk, (spec.head_dim,), eps=spec.norm_eps) * self.qk_norm
        qk = _rotate(qk, rotations)
        x = self.out(attend(qk[:, : spec.num_heads], qk[:, spec.num_heads :], v), x)
        return self.down(self.gated(F.rms_norm(x, width, eps=spec.norm_eps)), x)


@dataclass(frozen=True, slots=True)
class Decoder:
    """Fused parameters."""

    spec: DecoderSpec
    embedding: torch.Tensor
    layers: list[Layer]
    head: Project
    """Hidden states -> logits."""

    @property
    def vocab_size(self) -> int:
        return self.embedding.shape[0]

    def run(self, ids: torch.Tensor, positions: torch.Tensor, attend: AttendIn) -> torch.Tensor:
        """Final hidden states [N, hidden] of tokens ids [N] at these positions [N]; not yet multiplied by the
        weight of the last norm."""
        x, turned = F.embedding(ids, self.embedding), rotations(self.spec, positions)
        for i, layer in enumerate(self.layers):
            x = layer(x, turned, partial(attend, i))
        return F.rms_norm(x, x.shape[-1:], eps=self.spec.norm_eps)


def fuse(params: Params, spec: DecoderSpec, projections: Projections = PLAIN) -> Decoder:
    def of_layer(i: int) -> Get:
        return lambda name: params.get(f"model.layers.{i}.{name}")

    layers = [fuse_layer(of_layer(i), spec, projections) for i in range(spec.num_layers)]
    norm, head = norm_and_head(params)
    embedding = params["model.embed_tokens.weight"]
    return Decoder(spec, embedding, layers, projections.linear(head * norm, None))


def norm_and_head(params: Params) -> tuple[torch.Tensor, torch.Tensor]:
    """What makes logits of the hidden states: the weights of the last norm [hidden] and of the head
    [vocabulary, hidden]."""
    head = params.get("lm_head.weight", params["model.embed_tokens.weight"])
    return params["model.norm.weight"], head


Get = Callable[[str], torch.Tensor | None]
"""A layer's parameter by its name in the layer; None if it has none of that name."""


def fuse_layer(get: Get, spec: DecoderSpec, projections: Projections = PLAIN) -> Layer:
    """Fuse the parameters of a layer. Gradients reach them, so a trainer fuses in each forward pass."""

    def weight(name: str) -> torch.Tensor:
        tensor = get(f"{name}.weight")
        assert tensor is not None, name
        return tensor

    def pair(tensor: torch.Tensor) -> torch.Tensor:
        neighbours = torch.arange(spec.head_dim, device=tensor.device).view(2, -1).t().flatten()
        return tensor.unflatten(0, (-1, spec.head_dim))[:, neighbours].flatten(0, 1)

    def qkv(kind: str) -> torch.Tensor | None:
        q, k, v = (get(f"self_attn.{name}_proj.{kind}") for name in "qkv")
        return None if q is None or k is None or v is None else torch.cat((pair(q), pair(k), v))

    def qk_norm() -> torch.Tensor | None:
        q, k = (get(f"self_attn.{name}_norm.weight") for name in "qk")
        if q is None or k is None:
            return None
        return torch.cat((pair(q).expand(spec.num_heads, -1), pair(k).expand(spec.num_kv_heads, -1)))

    fused, mlp_norm = qkv("weight"), weight("post_attention_layernorm")
    assert fused is not None
    return Layer(
        spec,
        projections.linear(fused * weight("input_layernorm"), qkv("bias")),
        qk_norm(),
        projections.residual(weight("self_attn.o_proj"), get("self_attn.o_proj.bias")),
        projections.gated(weight("mlp.gate_proj") * mlp_norm, weight("mlp.up_proj") * mlp_norm),
        projections.residual(weight("mlp.down_proj"), None),
    )


def rotations(spec: DecoderSpec, positions: torch.Tensor) -> torch.Tensor:
    """Complex [N, 1, head_dim / 2] for positions [N]."""
    angles = positions.unsqueeze(1).float() * spec.inv_freq.to(positions.device)
    return torch.polar(torch.full_like(angles, spec.rope_scaling), angles).unsqueeze(1)


def _rotate(qk: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    turned = torch.view_as_complex(qk.float().unflatten(-1, (-1, 2))) * by
    return torch.view_as_real(turned).flatten(-2).to(qk.dtype)


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Attention within num_rows sequences of equal length, laid one after the other."""
    num_heads = q.shape[1]
    q, k, v = (t.unflatten(0, (num_rows, -1)).transpose(1, 2) for t in (q, k, v))
    k, v = for_every_head(k, num_heads), for_every_head(v, num_heads)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return mixed.transpose(1, 2).flatten(0, 1).flatten(1)


def for_every_head(kv: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Keys or values [n, kv_heads, T, head_dim] repeated to [n, num_heads, T, head_dim]. Few fused kernels
    take fewer of them than queries; without one, attention holds all scores, which grow with the square."""
    repeats = num_heads // kv.shape[1]
    return kv.unsqueeze(2).expand(-1, -1, repeats, -1, -1).flatten(1, 2)
