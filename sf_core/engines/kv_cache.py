"""Keys and values of every slot, one sequence per slot. Knows no requests and no model: who owns a slot and
how much of it is valid is the slot table's matter."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_BLOCK = 16
"""The capacity grows in steps of this many tokens."""


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
    """How many positions of each slot attention reads."""
    visible: torch.Tensor
    """[n, T, span], true where a token sees a cached position."""

    def bias(self, dtype: torch.dtype) -> torch.Tensor:
        """[n, T, span] to add to attention scores."""
        zeros = torch.zeros_like(self.visible, dtype=dtype)
        return zeros.masked_fill(~self.visible, torch.finfo(dtype).min)


class KVCache:
    """Per layer a tensor [2, slots, kv_heads, capacity, head_dim]; `fit` decides the capacity."""

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (2, num_slots, num_kv_heads, 0, head_dim)
        self._layers = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.device = device

    @property
    def capacity(self) -> int:
        return self._layers[0].shape[3]

    def fit(self, length: int) -> None:
        """Make room for sequences of this length; give room back if less than half is needed, as attention is
        fastest where it reads all of the memory."""
        old_capacity, capacity = self.capacity, -(-length // _BLOCK) * _BLOCK
        if old_capacity // 2 < length <= old_capacity:
            return
        kept = min(capacity, old_capacity)
        for i, old in enumerate(self._layers):
            new = old.new_empty((*old.shape[:3], capacity, old.shape[4]))
            new[:, :, :, :kept] = old[:, :, :, :kept]
            # Masked positions are multiplied by 0, which only finite values survive.
            new[:, :, :, kept:] = 0
            self._layers[i] = new

    def place(self, slots: torch.Tensor | None, starts: torch.Tensor, num_tokens: int) -> Placement:
        """For num_tokens more in each slot, sequence i going on at starts[i]; they must fit the capacity."""
        end = int(starts.max()) + num_tokens
        # Gaps between slots stall the memory prefetch: reading up to twice as much without gaps is faster.
        span = self.capacity if 2 * end > self.capacity else end
        positions = starts.unsqueeze(1) + torch.arange(num_tokens, device=self.device)
        rows = torch.arange(len(starts), device=self.device) if slots is None else slots
        num_kv_heads = self._layers[0].shape[2]
        heads = rows[:, None, None] * num_kv_heads + torch.arange(num_kv_heads, device=self.device)
        flat_index = (heads * self.capacity + positions.unsqueeze(2)).flatten()
        visible = torch.arange(span, device=self.device) <= positions.unsqueeze(2)
        return Placement(slots, positions, flat_index, span, visible)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, placement: Placement) -> None:
        """Store keys and values [n, T, kv_heads, head_dim]."""
        for stored, new in zip(self._layers[layer], (keys, values), strict=True):
            width = new.shape[-1]
            stored.view(-1, width).index_copy_(0, placement.flat_index, new.reshape(-1, width))

    def read(self, layer: int, placement: Placement) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [n, kv_heads, span, head_dim] of the placement's slots."""
        keys, values = self._layers[layer][:, :, :, : placement.span]
        if placement.slots is None:
            n = len(placement.positions)
            return keys[:n], values[:n]
        return keys.index_select(0, placement.slots), values.index_select(0, placement.slots)

    def copy(self, source: int, targets: list[int], length: int) -> None:
        """Give the targets the first `length` positions of the source."""
        for layer in self._layers:
            layer[:, targets, :, :length] = layer[:, source : source + 1, :, :length]

    def swap(self, a: list[int], b: list[int], length: int) -> None:
        """Exchange the first `length` positions of slots a[i] and b[i]."""
        for layer in self._layers:
            layer[:, a + b, :, :length] = layer[:, b + a, :, :length]
