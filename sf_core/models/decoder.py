"""A lean forward pass for the Llama family: Llama, Mistral, Qwen2, Qwen3 (dense). One definition serves
generation, with a cache, and training, with gradients. Loads and saves nothing; names are Hugging Face's.

RMSNorm weights are multiplied into the projection that follows; q, k and v are one projection, gate and up
are one; rotary pairs are made neighbours by reordering weight rows, so that a rotation is a complex product.
The factors of an adapter are fused likewise, beside the weights and never into them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from sf_core.models.context import LEAN_TYPES
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
    axes: torch.Tensor | None = None
    """[head_dim / 2] which of time, row and column turns each rotary pair, for a multimodal policy."""


def decoder_spec(config: Any, max_length: int) -> DecoderSpec | None:
    """The spec of a Hugging Face config, or None if this module cannot run it up to max_length tokens."""
    if config.model_type not in LEAN_TYPES:
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
    sections = rope.get("mrope_section")
    return DecoderSpec(
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        head_dim,
        config.rms_norm_eps,
        inv_freq,
        rope_scaling,
        None if sections is None else torch.arange(3).repeat_interleave(torch.tensor(sections)),
    )


def _rope(config: Any, head_dim: int) -> tuple[torch.Tensor, float]:
    rope = config.rope_parameters
    if rope["rope_type"] == "default":
        return 1.0 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2) / head_dim), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to a projection (Hu et al. 2021): up(down(x)), without a bias."""

    down: torch.Tensor
    """[ranks, width in]"""
    up: torch.Tensor
    """[width out, ranks], times alpha / rank."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(x, self.down), self.up)


@dataclass(frozen=True, slots=True)
class LayerFactors:
    """What an adapter adds to the projections of a layer; None where it adds nothing."""

    qkv: LowRank | None = None
    out: LowRank | None = None
    gated: LowRank | None = None
    down: LowRank | None = None


def _apply_lora(factors: LowRank | None, x: torch.Tensor) -> torch.Tensor | None:
    return None if factors is None else factors(x)


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
    norms: tuple[torch.Tensor, torch.Tensor]
    """Weights [hidden] of the norms before attention and the MLP, which the projections have already."""
    factors: LayerFactors = LayerFactors()

    def __call__(self, x: torch.Tensor, rotations: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Hidden states [N, hidden] after the layer."""
        spec = self.spec
        factors = self.factors
        width = x.shape[-1:]
        normed = F.rms_norm(x, width, eps=spec.norm_eps)
        heads = self.qkv(normed, _apply_lora(factors.qkv, normed)).view(x.shape[0], -1, spec.head_dim)
        num_qk = spec.num_heads + spec.num_kv_heads
        qk = heads[:, :num_qk]
        v = heads[:, num_qk:]
        if self.qk_norm is not None:
            qk = F.rms_norm(qk, (spec.head_dim,), eps=spec.norm_eps) * self.qk_norm
        qk = _rotate(qk, rotations)
        mixed = attend(qk[:, : spec.num_heads], qk[:, spec.num_heads :], v)
        x = self.out(mixed, x, _apply_lora(factors.out, mixed))
        normed = F.rms_norm(x, width, eps=spec.norm_eps)
        gated = self.gated(normed, _apply_lora(factors.gated, normed))
        return self.down(gated, x, _apply_lora(factors.down, gated))

    def with_factors(self, get: GetParameter, scale: float) -> Layer:
        """This layer with an adapter of these factors in place of the one it has. `scale`: alpha / rank."""
        return replace(self, factors=_fuse_factors(get, self.spec, self.norms, scale))


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
        x = F.embedding(ids, self.embedding)
        rotated = rotations(self.spec, positions)
        for i, layer in enumerate(self.layers):
            x = layer(x, rotated, partial(attend, i))
        return F.rms_norm(x, x.shape[-1:], eps=self.spec.norm_eps)

    def with_factors(self, params: Params, scale: float) -> Decoder:
        """This decoder with an adapter of these factors in place of the one it has. Shares the weights."""
        layers = [layer.with_factors(_layer_of(params, i), scale) for i, layer in enumerate(self.layers)]
        return replace(self, layers=layers)


def fuse(params: Params, spec: DecoderSpec, projections: Projections = PLAIN) -> Decoder:
    layers = [fuse_layer(_layer_of(params, i), spec, projections) for i in range(spec.num_layers)]
    norm, head = norm_and_head(params)
    embedding = params["model.embed_tokens.weight"]
    return Decoder(spec, embedding, layers, projections.linear(head * norm, None))


def norm_and_head(params: Params) -> tuple[torch.Tensor, torch.Tensor]:
    """What makes logits of the hidden states: the weights of the last norm [hidden] and of the head
    [vocabulary, hidden]."""
    head = params.get("lm_head.weight", params["model.embed_tokens.weight"])
    return params["model.norm.weight"], head


GetParameter = Callable[[str], torch.Tensor | None]
"""A layer's parameter by its name in the layer; None if it has none of that name."""


def _layer_of(params: Params, i: int) -> GetParameter:
    return lambda name: params.get(f"model.layers.{i}.{name}")


DOWN = "lora_A"
UP = "lora_B"
"""Names of the factors of a linear layer, beside its weight."""


def fuse_layer(get: GetParameter, spec: DecoderSpec, projections: Projections = PLAIN) -> Layer:
    """Fuse the parameters of a layer. Gradients reach them, so a trainer fuses in each forward pass."""

    def weight(name: str) -> torch.Tensor:
        tensor = get(f"{name}.weight")
        assert tensor is not None, name
        return tensor

    interleave = partial(_interleave_rotary, spec)

    def qkv(kind: str) -> torch.Tensor | None:
        q, k, v = (get(f"self_attn.{name}_proj.{kind}") for name in "qkv")
        return None if q is None or k is None or v is None else torch.cat((interleave(q), interleave(k), v))

    def qk_norm() -> torch.Tensor | None:
        q, k = (get(f"self_attn.{name}_norm.weight") for name in "qk")
        if q is None or k is None:
            return None
        return torch.cat(
            (interleave(q).expand(spec.num_heads, -1), interleave(k).expand(spec.num_kv_heads, -1))
        )

    fused = qkv("weight")
    norms = (weight("input_layernorm"), weight("post_attention_layernorm"))
    assert fused is not None
    return Layer(
        spec,
        projections.linear(fused * norms[0], qkv("bias")),
        qk_norm(),
        projections.residual(weight("self_attn.o_proj"), get("self_attn.o_proj.bias")),
        projections.gated(weight("mlp.gate_proj") * norms[1], weight("mlp.up_proj") * norms[1]),
        projections.residual(weight("mlp.down_proj"), None),
        norms,
    )


def _fuse_factors(
    get: GetParameter, spec: DecoderSpec, norms: tuple[torch.Tensor, torch.Tensor], scale: float
) -> LayerFactors:
    """Fuse the factors of a layer, NAME.lora_A [rank, width in] and NAME.lora_B [width out, rank] of linear
    layers. Gradients reach them."""

    def low_rank(rows: Mapping[str, int], norm: torch.Tensor | None = None) -> LowRank | None:
        """What is added to linear layers that read the same input and are fused to one. `rows`: the width out
        of each, by its name; that of a layer alone is not needed."""
        downs = [down for name in rows if (down := get(f"{name}.{DOWN}")) is not None]
        if not downs:
            return None
        ups = []
        for name, width_out in rows.items():
            up = get(f"{name}.{UP}")
            if up is None:
                up = downs[0].new_zeros(width_out, 0)
            elif name in _ROTATED:
                up = _interleave_rotary(spec, up)
            ups.append(up)
        down = torch.cat(downs)
        if norm is not None:
            down = down * norm
        return LowRank(down, torch.block_diag(*ups) * scale)

    width = spec.head_dim
    inner = (get(f"mlp.{name}_proj.{UP}") for name in ("gate", "up"))
    num_inner = next((up.shape[0] for up in inner if up is not None), 0)
    kv_width = spec.num_kv_heads * width
    heads = {
        "self_attn.q_proj": spec.num_heads * width,
        "self_attn.k_proj": kv_width,
        "self_attn.v_proj": kv_width,
    }
    return LayerFactors(
        low_rank(heads, norms[0]),
        low_rank({"self_attn.o_proj": 0}),
        low_rank({"mlp.gate_proj": num_inner, "mlp.up_proj": num_inner}, norms[1]),
        low_rank({"mlp.down_proj": 0}),
    )


_ROTATED = ("self_attn.q_proj", "self_attn.k_proj")


def _interleave_rotary(spec: DecoderSpec, rows: torch.Tensor) -> torch.Tensor:
    """Rows [heads * head_dim, ...], or a vector of them, with the two of each rotary pair next to each
    other."""
    # a pair is an element of the first half of a head and the same one of the second half
    halves = torch.arange(spec.head_dim, device=rows.device).view(2, -1)
    paired = halves.t().flatten()
    heads = rows.unflatten(0, (-1, spec.head_dim))
    return heads[:, paired].flatten(0, 1)


def rotations(spec: DecoderSpec, positions: torch.Tensor) -> torch.Tensor:
    """Complex [N, 1, head_dim / 2] for positions [N], or for times, rows and columns [N, 3]."""
    # one for all rotary pairs, or for each pair that on its axis
    pair_positions = positions.unsqueeze(1) if positions.dim() == 1 else positions[:, spec.axes]
    angles = pair_positions.float() * spec.inv_freq.to(positions.device)
    radii = torch.full_like(angles, spec.rope_scaling)
    return torch.polar(radii, angles).unsqueeze(1)


def _rotate(qk: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    rotated = torch.view_as_complex(qk.float().unflatten(-1, (-1, 2))) * rotation
    return torch.view_as_real(rotated).flatten(-2).to(qk.dtype)


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Attention within num_rows sequences of equal length, laid one after the other."""
    num_heads = q.shape[1]
    q, k, v = (t.unflatten(0, (num_rows, -1)).transpose(1, 2) for t in (q, k, v))
    k = repeat_kv(k, num_heads)
    v = repeat_kv(v, num_heads)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return mixed.transpose(1, 2).flatten(0, 1).flatten(1)


def repeat_kv(kv: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Keys or values [n, kv_heads, T, head_dim] repeated to [n, num_heads, T, head_dim]. Few fused kernels
    take fewer of them than queries; without one, attention holds all scores, which grow with the square."""
    repeats = num_heads // kv.shape[1]
    return kv.unsqueeze(2).expand(-1, -1, repeats, -1, -1).flatten(1, 2)
