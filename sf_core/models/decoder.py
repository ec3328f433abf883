"""A lean forward pass for the Llama family: Llama, Mistral, Qwen2, Qwen3 (dense). One definition serves
generation, with a cache, and training, with gradients. Loads and saves nothing; names are Hugging Face's.

RMSNorm weights are multiplied into the projection that follows; q, k and v are one projection, gate and up
are one; rotary pairs are made neighbours by reordering weight rows, so that a rotation is a complex product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from sf_core.models.projections import PLAIN, AddProject, Project, Projections

Params = Mapping[str, torch.Tensor]
"""Parameters by their Hugging Face names."""

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, q [N, heads, head_dim], k and v [N, kv_heads, head_dim]) -> [N, heads * head_dim] over N tokens."""


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
    qkv: Project
    qk_norm: torch.Tensor | None
    """[heads + kv_heads, head_dim]"""
    out: AddProject
    gated: Project
    down: AddProject


@dataclass(frozen=True, slots=True)
class Decoder:
    """Fused parameters, differentiable functions of the parameters they were fused from."""

    spec: DecoderSpec
    embedding: torch.Tensor
    layers: list[Layer]
    head: Project

    @property
    def vocab_size(self) -> int:
        return self.embedding.shape[0]

    def hidden(self, ids: torch.Tensor, rotations: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Final hidden states [N, hidden] of tokens ids [N], whose positions made the `rotations`."""
        spec, eps = self.spec, self.spec.norm_eps
        num_qk = spec.num_heads + spec.num_kv_heads
        x = F.embedding(ids, self.embedding)
        width = x.shape[-1:]
        for i, layer in enumerate(self.layers):
            qkv = layer.qkv(F.rms_norm(x, width, eps=eps))
            heads = qkv.view(ids.shape[0], -1, spec.head_dim)
            qk, v = heads[:, :num_qk], heads[:, num_qk:]
            if layer.qk_norm is not None:
                qk = F.rms_norm(qk, (spec.head_dim,), eps=eps) * layer.qk_norm
            qk = _rotate(qk, rotations)
            mixed = attend(i, qk[:, : spec.num_heads], qk[:, spec.num_heads :], v)
            x = layer.out(mixed, x)
            x = layer.down(layer.gated(F.rms_norm(x, width, eps=eps)), x)
        return F.rms_norm(x, width, eps=eps)


def fuse(params: Params, spec: DecoderSpec, projections: Projections = PLAIN) -> Decoder:
    """Fuse the parameters. Gradients reach `params`, so a trainer fuses before each forward pass."""

    def get(name: str) -> torch.Tensor:
        return params[f"model.{name}"]

    embedding = get("embed_tokens.weight")
    neighbours = torch.arange(spec.head_dim, device=embedding.device).view(2, -1).t().flatten()

    def paired(weight: torch.Tensor) -> torch.Tensor:
        return weight.unflatten(0, (-1, spec.head_dim))[:, neighbours].flatten(0, 1)

    def qkv(attn: str, kind: str) -> torch.Tensor:
        q, k, v = (get(f"{attn}.{name}_proj.{kind}") for name in "qkv")
        return torch.cat((paired(q), paired(k), v))

    def qk_norm(attn: str) -> torch.Tensor:
        q, k = (paired(get(f"{attn}.{name}_norm.weight")) for name in "qk")
        return torch.cat((q.expand(spec.num_heads, -1), k.expand(spec.num_kv_heads, -1)))

    def layer(i: int) -> Layer:
        attn, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
        mlp_norm = get(f"layers.{i}.post_attention_layernorm.weight")
        has_bias, has_norm = f"model.{attn}.q_proj.bias" in params, f"model.{attn}.q_norm.weight" in params
        return Layer(
            projections.linear(
                qkv(attn, "weight") * get(f"layers.{i}.input_layernorm.weight"),
                qkv(attn, "bias") if has_bias else None,
            ),
            qk_norm(attn) if has_norm else None,
            projections.residual(get(f"{attn}.o_proj.weight"), params.get(f"model.{attn}.o_proj.bias")),
            projections.gated(
                get(f"{mlp}.gate_proj.weight") * mlp_norm, get(f"{mlp}.up_proj.weight") * mlp_norm
            ),
            projections.residual(get(f"{mlp}.down_proj.weight"), None),
        )

    head = params.get("lm_head.weight", embedding) * get("norm.weight")
    return Decoder(
        spec, embedding, [layer(i) for i in range(spec.num_layers)], projections.linear(head, None)
    )


def rotations(spec: DecoderSpec, positions: torch.Tensor) -> torch.Tensor:
    """Complex [N, 1, head_dim / 2] for positions [N]."""
    angles = positions.unsqueeze(1).float() * spec.inv_freq.to(positions.device)
    return torch.polar(torch.full_like(angles, spec.rope_scaling), angles).unsqueeze(1)


def _rotate(qk: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    turned = torch.view_as_complex(qk.float().unflatten(-1, (-1, 2))) * by
    return torch.view_as_real(turned).flatten(-2).to(qk.dtype)


def causal_forward(params: Params, spec: DecoderSpec, ids: torch.Tensor) -> tuple[Decoder, torch.Tensor]:
    """The fused decoder and its final hidden states [B, T, hidden] for ids [B, T], right-padded: attention is
    causal, so padding changes nothing before it. Give the positions of interest to `Decoder.head`."""
    decoder = fuse(params, spec)
    num_rows, length = ids.shape

    def attend(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return causal_attention(q, k, v, num_rows)

    positions = torch.arange(length, device=ids.device).repeat(num_rows)
    hidden = decoder.hidden(ids.flatten(), rotations(spec, positions), attend)
    return decoder, hidden.unflatten(0, (num_rows, length))


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Attention within num_rows sequences of equal length, laid one after the other."""
    q, k, v = (t.unflatten(0, (num_rows, -1)).transpose(1, 2) for t in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return mixed.transpose(1, 2).flatten(0, 1).flatten(1)
