"""Weights of a network in the form and dtype that forward passes read, made once for many of them.

Backward passes sum their gradients in float32. `give_gradients` takes the sums back to the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from sf_core.models.decoder import DecoderSpec, Layer, fuse_layer
from sf_core.models.projections import wrap_weights

Through = Callable[[torch.Tensor], torch.Tensor]


def fuse_through(parameters: Mapping[str, torch.Tensor], spec: DecoderSpec, through: Through) -> Layer:
    """The layer of these parameters. `through` makes of each fused weight what the layer reads."""
    layer = fuse_layer(parameters.get, spec, wrap_weights(through))
    return layer if layer.qk_norm is None else replace(layer, qk_norm=through(layer.qk_norm))


class ComputeTensors:
    """Parameters as they are. One that has two names is held once."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
        self._parameters = {id(parameter): parameter for parameter in parameters.values()}
        copies = {key: _leaf(parameter, dtype) for key, parameter in self._parameters.items()}
        self._held = list(copies.values())
        self.tensors = {name: copies[id(parameter)] for name, parameter in parameters.items()}

    def accumulate_gradients(self) -> None:
        for parameter, copies in zip(self._parameters.values(), self._held, strict=True):
            if copies.grad is not None:
                parameter.grad = copies.grad if parameter.grad is None else parameter.grad.add_(copies.grad)


class ComputeLayer:
    """The parameters of a layer of the lean decoder, fused like an engine's: in the dtype of computing."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], spec: DecoderSpec, dtype: torch.dtype) -> None:
        self._parameters = parameters
        self._spec = spec
        self._fused: list[torch.Tensor] = []
        with torch.no_grad():
            cast = {name: parameter.to(dtype) for name, parameter in parameters.items()}
            self.layer = fuse_through(cast, spec, self._record)

    def _record(self, fused: torch.Tensor) -> torch.Tensor:
        self._fused.append(_leaf(fused, fused.dtype))
        return self._fused[-1]

    def accumulate_gradients(self) -> None:
        """Fuse the parameters again, in their own dtype, for a backward pass from what was fused to them."""
        fused: list[torch.Tensor] = []

        def collect(tensor: torch.Tensor) -> torch.Tensor:
            fused.append(tensor)
            return tensor

        if any(leaf.grad is not None for leaf in self._fused):
            fuse_through(self._parameters, self._spec, collect)
            torch.autograd.backward(fused, [leaf.grad for leaf in self._fused])
        self._fused.clear()


def _leaf(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of this dtype that sums its gradients in float32."""
    leaf = tensor.detach().to(dtype).requires_grad_()
    leaf.grad_dtype = torch.float32
    return leaf
