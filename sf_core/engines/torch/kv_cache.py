"""The KV cache, one sequence per slot. Knows no requests and no model: which request has a slot, and how much
of the slot is valid, is in the slot table."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sf_core.models.cache_size import layer_elements, round_up, too_large


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the new tokens of one forward pass go: n sequences, T tokens each."""

    slots: torch.Tensor | None
    """[n]; None: slots 0 to n-1, whose cache is then read without a copy."""
    positions: torch.Tensor
    """[n, T], each token's place in its sequence."""
    flat_index: torch.Tensor
    """[n * T * kv_heads] into the cache viewed as rows of head_dim."""
    span: int
    """Number of positions of each slot that attention reads."""
    visible: torch.Tensor
    """[n, T, span], true where a token sees a cached position."""

    def bias(self, dtype: torch.dtype) -> torch.Tensor:
        """[n, T, span] to add to attention scores."""
        zeros = torch.zeros_like(self.visible, dtype=dtype)
        return zeros.masked_fill(~self.visible, torch.finfo(dtype).min)


class KVCache:
    """One tensor per layer, [2, slots, kv_heads, capacity, head_dim], a view of the front of memory
    allocated once; `fit` decides the capacity."""

    def __init__(
        self, num_layers: int, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        """`shape` is slots, kv_heads, longest sequence, head_dim. Raises ValueError if the device does not
        have the memory."""
        self._num_slots, self._num_kv_heads, length, self._head_dim = shape
        size = layer_elements(*shape)
        try:
            # One piece more than there are layers: a layer is laid out anew from its own into the spare one.
            self._memory = [torch.empty(size, dtype=dtype, device=device) for _ in range(num_layers + 1)]
        except RuntimeError as error:
            num_bytes = size * dtype.itemsize * (num_layers + 1)
            given = f"the {device.type} device does not have that much left"
            raise ValueError(too_large(num_bytes, self._num_slots, length, given)) from error
        self.device = device
        self.capacity = 0
        self._layers = [self._view(memory, 0) for memory in self._memory[:-1]]
        # The same as rows of head_dim: keys, values.
        self._rows = [(layer[0].flatten(0, 2), layer[1].flatten(0, 2)) for layer in self._layers]

    def fit(self, length: int) -> None:
        """Make room for sequences of this length; give room back if less than half is needed, as attention is
        fastest where it reads all of the memory."""
        capacity = round_up(length)
        if self.capacity // 2 < capacity <= self.capacity:
            return
        kept = min(capacity, self.capacity)
        for i, old in enumerate(self._layers):
            new = self._view(self._memory[-1], capacity)
            new[:, :, :, :kept] = old[:, :, :, :kept]
            # Masked positions are multiplied by 0, which only finite values survive.
            new[:, :, :, kept:] = 0
            self._layers[i] = new
            self._memory[i], self._memory[-1] = self._memory[-1], self._memory[i]
            self._rows[i] = (new[0].flatten(0, 2), new[1].flatten(0, 2))
        self.capacity = capacity

    def _view(self, memory: torch.Tensor, capacity: int) -> torch.Tensor:
        shape = 2, self._num_slots, self._num_kv_heads, capacity, self._head_dim
        return memory[: math.prod(shape)].view(shape)

    def place(self, slots: torch.Tensor | None, starts: torch.Tensor, num_tokens: int) -> Placement:
        """Place num_tokens more in each slot, sequence i from starts[i] on; they must fit the capacity."""
        end = int(starts.max()) + num_tokens
        # Gaps between slots stall the memory prefetch: reading up to twice as much without gaps is faster.
        span = self.capacity if 2 * end > self.capacity else end
        positions = starts.unsqueeze(1) + torch.arange(num_tokens, device=self.device)
        rows = torch.arange(len(starts), device=self.device) if slots is None else slots
        heads = rows[:, None, None] * self._num_kv_heads + torch.arange(
            self._num_kv_heads, device=self.device
        )
        flat_index = (heads * self.capacity + positions.unsqueeze(2)).flatten()
        visible = torch.arange(span, device=self.device) <= positions.unsqueeze(2)
        return Placement(slots, positions, flat_index, span, visible)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, placement: Placement) -> None:
        """Store keys and values of the placed tokens, [..., head_dim] in the order tokens, kv_heads."""
        stored_keys, stored_values = self._rows[layer]
        stored_keys.index_copy_(0, placement.flat_index, keys.reshape(-1, self._head_dim))
        stored_values.index_copy_(0, placement.flat_index, values.reshape(-1, self._head_dim))

    def read(self, layer: int, placement: Placement) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [n, kv_heads, span, head_dim] of the placement's slots."""
        span = placement.span
        keys, values = self._layers[layer][0, :, :, :span], self._layers[layer][1, :, :, :span]
        if placement.slots is None:
            n = placement.positions.shape[0]
            return keys[:n], values[:n]
        return keys.index_select(0, placement.slots), values.index_select(0, placement.slots)

    def copy(self, source: int, targets: list[int], length: int) -> None:
        """Copy the first `length` positions of slot `source` to the slots `targets`."""
        for layer in self._layers:
            layer[:, targets, :, :length] = layer[:, source : source + 1, :, :length]

    def swap(self, a: list[int], b: list[int], length: int) -> None:
        """Exchange the first `length` positions of slots a[i] and b[i]."""
        for layer in self._layers:
            layer[:, a + b, :, :length] = layer[:, b + a, :, :length]
