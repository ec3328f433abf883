"""The KV cache, one sequence per slot. Knows no requests and no model: which request has a slot, and how much
of the slot is valid, is in the slot table."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sf_core.models.context import layer_elements

_BLOCK = 16
"""Capacities and spans are multiples of this many positions."""

_MOVE_STEPS = 8
"""Number of steps in which the sequences of one layer are moved."""

_MAX_SWAPPED_TOKENS = 32_768
"""Most tokens that are held twice while slots are exchanged."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    num_layers: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the new tokens of one forward pass go: n sequences, T tokens each."""

    slots: torch.Tensor | None
    """[n]; None: slots 0 to n-1, whose cache is then read without a copy."""
    positions: torch.Tensor
    """[n, T], each token's position in its sequence."""
    flat_index: torch.Tensor
    """[n * T * kv_heads] into the cache viewed as rows of head_dim."""
    span: int
    """Number of positions of each slot that attention reads."""

    def bias(self, dtype: torch.dtype) -> torch.Tensor:
        """[n, T, span] to add to attention scores, which hides the positions that a token must not see."""
        hidden = torch.arange(self.span, device=self.positions.device) > self.positions.unsqueeze(2)
        return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, torch.finfo(dtype).min)


class KVCache:
    """One tensor per layer, [2, slots, kv_heads, capacity, head_dim], a view of the front of memory allocated
    once. On the CPU the capacity follows the longest sequence: gaps between sequences stall the memory
    prefetch, and cost a fifth of all speed. Elsewhere it is that of the longest sequence allowed."""

    def __init__(
        self, shape: CacheShape, num_slots: int, length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`length` is that of the longest sequence allowed. Raises ValueError if the device does not have the
        memory."""
        self._shape = shape
        self._num_slots = num_slots
        self._length = length
        size = layer_elements(num_slots, shape.num_kv_heads, length, shape.head_dim)
        try:
            self._memory = [torch.empty(size, dtype=dtype, device=device) for _ in range(shape.num_layers)]
        except RuntimeError as error:
            num_bytes = size * dtype.itemsize * shape.num_layers
            raise ValueError(
                f"the KV cache of the engine needs {num_bytes / 1e9:,.1f} GB for {num_slots} requests "
                f"(engine.max_running) of {length} tokens (engine.context_length), more than the "
                f"{device.type} device has left: lower engine.max_running or engine.context_length"
            ) from error
        self.device = device
        self._capacity = 0
        self._is_compact = device.type == "cpu"
        self._view_layers()

    def fit(self, length: int) -> None:
        """Make room for sequences of this length; give room back if less than half is needed."""
        capacity = min(_round_up(length), self._length) if self._is_compact else self._length
        fits = capacity <= self._capacity
        is_half_used = capacity > self._capacity // 2
        if fits and is_half_used:
            return
        if not fits:
            # grow by an eighth at least, or long sequences would be moved all the time
            capacity = max(capacity, min(_round_up(self._capacity * 9 // 8), self._length))
        for memory in self._memory:
            self._move(memory.view(-1, self._shape.head_dim), capacity)
        self._capacity = capacity
        self._view_layers()

    def _move(self, rows: torch.Tensor, capacity: int) -> None:
        """Move a layer's sequences, rows of head_dim, so that they begin `capacity` rows apart, in place: a
        piece at a time, from the side on which there is room."""
        old = self._capacity
        num_kept = min(capacity, self._capacity)
        # keys and values of each head of each slot
        num_sequences = 2 * self._num_slots * self._shape.num_kv_heads
        per_step = math.ceil(num_sequences / _MOVE_STEPS)
        begins = range(0, num_sequences, per_step)
        # sequences that move apart are moved from the last one on, or they would overwrite each other
        for begin in reversed(begins) if capacity > old else begins:
            end = min(begin + per_step, num_sequences)
            source = rows[begin * old : end * old].unflatten(0, (end - begin, old))[:, :num_kept].clone()
            target = rows[begin * capacity : end * capacity].unflatten(0, (end - begin, capacity))
            target[:, :num_kept] = source
            # attention multiplies masked positions by 0, and 0 times infinity or NaN is NaN
            target[:, num_kept:] = 0

    def _view_layers(self) -> None:
        shape = 2, self._num_slots, self._shape.num_kv_heads, self._capacity, self._shape.head_dim
        num_elements = math.prod(shape)
        self._layers: list[torch.Tensor] = []
        self._rows: list[tuple[torch.Tensor, torch.Tensor]] = []
        for memory in self._memory:
            layer = memory[:num_elements].view(shape)
            self._layers.append(layer)
            # keys and values as rows of head_dim
            self._rows.append((layer[0].flatten(0, 2), layer[1].flatten(0, 2)))

    def place(self, slots: torch.Tensor | None, starts: torch.Tensor, num_tokens: int) -> Placement:
        """Place num_tokens more in each slot, sequence i from starts[i] on; they must fit the capacity."""
        num_heads = self._shape.num_kv_heads
        span = min(_round_up(int(starts.max()) + num_tokens), self._capacity)
        if self._is_compact and 2 * span > self._capacity:
            # reading up to twice as much without gaps is faster
            span = self._capacity
        positions = starts.unsqueeze(1) + torch.arange(num_tokens, device=self.device)
        rows = torch.arange(len(starts), device=self.device) if slots is None else slots
        heads = rows[:, None, None] * num_heads + torch.arange(num_heads, device=self.device)
        flat_index = (heads * self._capacity + positions.unsqueeze(2)).flatten()
        return Placement(slots, positions, flat_index, span)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, placement: Placement) -> None:
        """Store keys and values of the placed tokens, [..., head_dim] in the order tokens, kv_heads."""
        stored_keys, stored_values = self._rows[layer]
        stored_keys.index_copy_(0, placement.flat_index, keys.reshape(-1, self._shape.head_dim))
        stored_values.index_copy_(0, placement.flat_index, values.reshape(-1, self._shape.head_dim))

    def read(self, layer: int, placement: Placement) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [n, kv_heads, span, head_dim] of the placement's slots."""
        span = placement.span
        keys = self._layers[layer][0, :, :, :span]
        values = self._layers[layer][1, :, :, :span]
        if placement.slots is None:
            n = placement.positions.shape[0]
            return keys[:n], values[:n]
        return keys.index_select(0, placement.slots), values.index_select(0, placement.slots)

    def copy(self, source: int, targets: list[int], length: int) -> None:
        """Copy the first `length` positions of slot `source` to the slots `targets`."""
        for layer in self._layers:
            layer[:, targets, :, :length] = layer[:, source : source + 1, :, :length]

    def clear(self, slots: list[int]) -> None:
        """Set all positions of these slots to zero."""
        for layer in self._layers:
            layer[:, slots] = 0

    def swap(self, a: list[int], b: list[int], length: int) -> None:
        """Exchange the first `length` positions of slots a[i] and b[i]."""
        slots_per_swap = max(1, _MAX_SWAPPED_TOKENS // (2 * length))
        for i in range(0, len(a), slots_per_swap):
            first = a[i : i + slots_per_swap]
            second = b[i : i + slots_per_swap]
            for layer in self._layers:
                layer[:, first + second, :, :length] = layer[:, second + first, :, :length]


def _round_up(length: int) -> int:
    return -(-length // _BLOCK) * _BLOCK
