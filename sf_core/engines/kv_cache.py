"""Keys and values of every slot, one sequence per slot. Knows no requests and no model: who owns a slot and how
much of it is valid is the slot table's matter."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_BLOCK = 32
"""Capacity and attention spans are multiples of this, so that their shapes rarely change."""


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
    """How much of each slot attention reads."""
    visible: torch.Tensor
    """[n, T, span], true where a token sees a cached position."""


class KVCache:
    """Per layer a tensor [2, slots, kv_heads, capacity, head_dim]. The capacity follows the longest sequence so
    far: as long as sequences are alike, attention reads dense memory, twice as fast as strided."""

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        # Zeros: masked positions are multiplied by 0, which only finite values survive.
        shape = (2, num_slots, num_kv_heads, 0, head_dim)
        self._layers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.device = device

    @property
    def capacity(self) -> int:
        return self._layers[0].shape[3]

    def place(self, slots: torch.Tensor | None, starts: torch.Tensor, num_tokens: int) -> Placement:
        """Make room for num_tokens in each slot, sequence i going on at starts[i]."""
        end = int(starts.max()) + num_tokens
        span = -(-end // _BLOCK) * _BLOCK
        self._reserve(span)
        positions = starts.unsqueeze(1) + torch.arange(num_tokens, device=self.device)
        rows = torch.arange(len(starts), device=self.device) if slots is None else slots
        num_kv_heads = self._layers[0].shape[2]
        heads = rows[:, None, None] * num_kv_heads + torch.arange(num_kv_heads, device=self.device)
        flat_index = (heads * self.capacity + positions.unsqueeze(2)).flatten()
        visible = torch.arange(span, device=self.device) <= positions.unsqueeze(2)
        return Placement(slots, positions, flat_index, span, visible)

    def update(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, placement: Placement
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys and values [n, T, kv_heads, head_dim]; returns all of [n, kv_heads, span, head_dim]."""
        head_dim = keys.shape[-1]
        stored_k, stored_v = self._layers[layer]
        stored_k.view(-1, head_dim).index_copy_(0, placement.flat_index, keys.reshape(-1, head_dim))
        stored_v.view(-1, head_dim).index_copy_(0, placement.flat_index, values.reshape(-1, head_dim))
        if placement.slots is None:
            n = len(placement.positions)
            return stored_k[:n, :, : placement.span], stored_v[:n, :, : placement.span]
        return (
            stored_k[:, :, : placement.span].index_select(0, placement.slots),
            stored_v[:, :, : placement.span].index_select(0, placement.slots),
        )

    def copy(self, source: int, targets: list[int], length: int) -> None:
        """Give the targets the first `length` positions of the source."""
        for layer in self._layers:
            layer[:, targets, :, :length] = layer[:, source : source + 1, :, :length]

    def swap(self, a: list[int], b: list[int], length: int) -> None:
        """Exchange the first `length` positions of slots a[i] and b[i]."""
        for layer in self._layers:
            layer[:, a + b, :, :length] = layer[:, b + a, :, :length]

    def _reserve(self, capacity: int) -> None:
        if capacity <= self.capacity:
            return
        for i, old in enumerate(self._layers):
            grown = old.new_zeros((*old.shape[:3], capacity, old.shape[4]))
            grown[:, :, :, : old.shape[3]] = old
            self._layers[i] = grown
