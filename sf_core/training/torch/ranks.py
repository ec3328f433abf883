"""What the ranks of a train step exchange: sums of gradients and small values. Membership and meeting are
rendezvous.py's.

Every rank holds the whole network and makes the same optimiser step (docs/decisions/011).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

BUCKET_ELEMENTS = 1 << 24
"""Approximate number of elements per all-reduce: one message per tensor would cost its latency each time."""


class ExchangeError(RuntimeError):
    """An exchange failed: another rank is gone, or did not answer in time."""


class Ranks(Protocol):
    """A train step as one rank sees it."""

    rank: int
    size: int
    group: str
    """Name of the process group; it changes with its members, and when one of them lost its state."""

    def add_up(self, tensors: Iterable[torch.Tensor]) -> None:
        """Put the sum over all ranks into each tensor; the same bits on every rank."""

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks in their order, on every rank. For small, picklable values."""


class SingleRank:
    """One rank: nothing is exchanged."""

    rank, size, group = 0, 1, ""

    def add_up(self, tensors: Iterable[torch.Tensor]) -> None:
        return None

    def gather(self, value: Any) -> list[Any]:
        return [value]


class Group:
    """The ranks of torch.distributed's default process group. Its methods raise ExchangeError."""

    def __init__(self, group: str, workers: tuple[str, ...], timeout_s: float) -> None:
        """`timeout_s` bounds an exchange between GPUs; the default group has its own bound."""
        self.group, self.workers = group, workers
        self._timeout_s = timeout_s
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def add_up(self, tensors: Iterable[torch.Tensor]) -> None:
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            with _exchange():
                dist.all_reduce(flat, group=self._nccl if flat.is_cuda else None)
            for tensor, total in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                tensor.copy_(total.view_as(tensor))

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        with _exchange():
            dist.all_gather_object(values, value)
        return values

    @functools.cached_property
    def _nccl(self) -> Any:
        return dist.new_group(backend="nccl", timeout=timedelta(seconds=self._timeout_s))


@contextmanager
def _exchange() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # gloo, NCCL and the store raise it or a subclass
        raise ExchangeError(" ".join(str(error).split())[:300]) from error


def _buckets(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    bucket: list[torch.Tensor] = []
    for tensor in tensors:
        if bucket and sum(t.numel() for t in bucket) + tensor.numel() > BUCKET_ELEMENTS:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket
