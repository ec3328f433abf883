"""The matrix products of a decoder, each with the cheap operation that follows it, in two versions: PLAIN
differentiates and runs anywhere, PACKED is faster on CPU. Knows no layers.

To each product something may be added before what follows: `plus`, the part of an adapter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F


class Project(Protocol):
    """([N, width in], what is added to the product [N, width out] or nothing) -> [N, width out]."""

    def __call__(self, x: torch.Tensor, plus: torch.Tensor | None = None, /) -> torch.Tensor: ...


class AddProject(Protocol):
    """([N, width in], the residual stream [N, width out], what is added to the product likewise or nothing)
    -> the stream with both added."""

    def __call__(
        self, x: torch.Tensor, onto: torch.Tensor, plus: torch.Tensor | None = None, /
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Projections:
    """Functions that make projections of weights [width out, width in] and biases [width out]."""

    linear: Callable[[torch.Tensor, torch.Tensor | None], Project]
    residual: Callable[[torch.Tensor, torch.Tensor | None], AddProject]
    gated: Callable[[torch.Tensor, torch.Tensor], Project]
    """(weights of gate, weights of up) -> silu(gate(x)) * up(x); `plus` [N, 2 * width out] is for both."""


def _project(
    x: torch.Tensor, plus: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    if plus is None:
        return F.linear(x, weight, bias)
    # the sum is rounded once, as PACKED rounds it
    return torch.addmm(plus if bias is None else plus + bias, x, weight.t())


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Project:
    return lambda x, plus=None: _project(x, plus, weight, bias)


def _residual(weight: torch.Tensor, bias: torch.Tensor | None) -> AddProject:
    return lambda x, onto, plus=None: onto + _project(x, plus, weight, bias)


def _gated(gate: torch.Tensor, up: torch.Tensor) -> Project:
    return _gated_by(torch.cat((gate, up)))


def _gated_by(both: torch.Tensor) -> Project:
    def project(x: torch.Tensor, plus: torch.Tensor | None = None) -> torch.Tensor:
        gates, ups = _project(x, plus, both).chunk(2, dim=-1)
        return F.silu(gates) * ups

    return project


PLAIN = Projections(_linear, _residual, _gated)


def wrap_weights(transform: Callable[[torch.Tensor], torch.Tensor]) -> Projections:
    """PLAIN, of what a function makes of every weight and bias."""

    def transform_optional(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else transform(tensor)

    return Projections(
        lambda weight, bias: _linear(transform(weight), transform_optional(bias)),
        lambda weight, bias: _residual(transform(weight), transform_optional(bias)),
        lambda gate, up: _gated_by(transform(torch.cat((gate, up)))),
    )


# oneDNN's operators, which the compiler of torch uses too: weights in the order its kernels read them, and
# the following operation done while the result is in cache. A tenth faster than the BLAS behind F.linear.
_reorder = torch.ops.mkldnn._reorder_linear_weight
_pointwise = torch.ops.mkldnn._linear_pointwise


def _pack_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Project:
    packed = _reorder(weight, None)

    def project(x: torch.Tensor, plus: torch.Tensor | None = None) -> torch.Tensor:
        if plus is None:
            return _pointwise(x, packed, bias, "none", [], "")
        return _pointwise.binary(x, plus, packed, bias, "add")

    return project


def _pack_residual(weight: torch.Tensor, bias: torch.Tensor | None) -> AddProject:
    packed = _reorder(weight, None)

    def project(x: torch.Tensor, onto: torch.Tensor, plus: torch.Tensor | None = None) -> torch.Tensor:
        if plus is None:
            return _pointwise.binary(x, onto, packed, bias, "add")
        return onto + _pointwise.binary(x, plus, packed, bias, "add")

    return project


def _pack_gated(gate: torch.Tensor, up: torch.Tensor) -> Project:
    packed_gate = _reorder(gate, None)
    packed_up = _reorder(up, None)

    def project(x: torch.Tensor, plus: torch.Tensor | None = None) -> torch.Tensor:
        if plus is None:
            gates = _pointwise(x, packed_gate, None, "swish", [], "")
            return _pointwise.binary(x, gates, packed_up, None, "mul")
        to_gates, to_ups = (half.contiguous() for half in plus.chunk(2, dim=-1))
        gates = F.silu(_pointwise.binary(x, to_gates, packed_gate, None, "add"))
        return gates.mul_(_pointwise.binary(x, to_ups, packed_up, None, "add"))

    return project


PACKED = Projections(_pack_linear, _pack_residual, _pack_gated)
"""Projections on CPU, without gradients."""


def fastest(dtype: torch.dtype, device: torch.device) -> Projections:
    """The fastest projections for inference."""
    packs = has_fast_products(dtype, device) and torch.backends.mkldnn.is_available()
    return PACKED if packs else PLAIN


def fastest_dtype() -> Literal["float32", "bfloat16"]:
    """The dtype that `policy.dtype: auto` stands for in this process."""
    is_fast = torch.cuda.is_available() or has_fast_products(torch.bfloat16, torch.device("cpu"))
    return "bfloat16" if is_fast else "float32"


def has_fast_products(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this is a CPU with instructions for products of this dtype. Without them bfloat16 is converted,
    element by element, and fused kernels convert least."""
    has_bfloat16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return device.type == "cpu" and (dtype == torch.float32 or (dtype == torch.bfloat16 and has_bfloat16))
