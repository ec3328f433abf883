"""What the ranks of a train step exchange: small values, slices of tensors, and what a sharded model does by
itself. Membership and meeting are rendezvous.py's.
"""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from ipaddress import ip_address
from typing import Any, Protocol

import psutil
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from storage.tensors.shards import Slices
from storage.tensors.torch_bytes import bytes_of

ALONE_TIMEOUT_S = 60.0
"""Bound of an exchange of a single rank, which ends at once."""


class ExchangeError(RuntimeError):
    """An exchange failed: another rank is gone, or did not answer in time."""


class Ranks(Protocol):
    """A train step as one rank sees it."""

    rank: int
    size: int
    group: str
    """Name of the process group; it changes with its members, and when one of them lost its state."""

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks in their order, on every rank. For small, picklable values."""

    def collect(self, slices: Slices, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """On rank 0, the whole tensors of which the ranks have slices; nothing on the others. If they came
        from several ranks, they are in host memory and of this dtype."""

    def mesh(self, device: str) -> DeviceMesh:
        """All ranks in a row, which exchange tensors of this kind of device."""


class SingleRank:
    """One rank: nothing is exchanged."""

    rank = 0
    size = 1
    group = ""

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def collect(self, slices: Slices, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return {name: tensor for name, (_, tensor) in slices.items()}

    def mesh(self, device: str) -> DeviceMesh:
        if not dist.is_initialized():
            make_group(dist.HashStore(), 0, 1, "127.0.0.1", ALONE_TIMEOUT_S)
        group: Any = dist.group.WORLD if device == "cpu" else dist.new_group(backend="nccl")
        return DeviceMesh.from_group(group, device)


class ProcessGroup:
    """The ranks of torch.distributed's default process group. Its methods raise ExchangeError."""

    def __init__(self, group: str, workers: tuple[str, ...], timeout_s: float) -> None:
        """`timeout_s` bounds an exchange between GPUs; the default group has its own bound."""
        self.group = group
        self.workers = workers
        self._timeout_s = timeout_s
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        with exchange():
            dist.all_gather_object(values, value)
        return values

    def collect(self, slices: Slices, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        places = self.gather({name: place for name, (place, _) in slices.items()})
        whole: dict[str, torch.Tensor] = {}
        with exchange():
            for name in dict.fromkeys(name for own in places for name in own):
                if self.rank:
                    if name in slices:
                        dist.send(_bytes(slices[name][1].to(dtype)), dst=0)
                    continue
                for rank, own in enumerate(places):
                    if (place := own.get(name)) is None:
                        continue
                    if name not in whole:
                        whole[name] = torch.empty(place.shape, dtype=dtype)
                    if rank == 0:
                        part = slices[name][1].detach().to("cpu", dtype)
                    else:
                        part = torch.empty(place.size, dtype=dtype)
                        dist.recv(_bytes(part), src=rank)
                    whole[name][place.box] = part
        return whole

    def mesh(self, device: str) -> DeviceMesh:
        group: Any = dist.group.WORLD if device == "cpu" else self._nccl
        return DeviceMesh.from_group(group, device)

    @functools.cached_property
    def _nccl(self) -> Any:
        return dist.new_group(backend="nccl", timeout=timedelta(seconds=self._timeout_s))


def make_group(store: dist.Store, rank: int, size: int, host: str, timeout_s: float) -> None:
    """Make torch.distributed's default process group, of gloo, which listens on this host's address, as do
    groups that are made later. Raises RuntimeError if the others do not come."""
    # by default gloo listens on the address to which the host's name resolves, and torch passes no options on
    os.environ["GLOO_SOCKET_IFNAME"] = _interface(host)
    timeout = timedelta(seconds=timeout_s)
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    except BaseException:
        # torch numbers groups, those too that did not come about: ranks that counted differently never meet
        dist.distributed_c10d._world.group_count = 0
        raise


def _interface(host: str) -> str:
    """Name of the network interface with this address."""
    address = str(socket.getaddrinfo(host, None)[0][4][0])
    # all of 127.0.0.0/8 lead to the interface that only has the first
    address = "127.0.0.1" if ip_address(address).is_loopback else address
    for name, known in psutil.net_if_addrs().items():
        if address in {one.address for one in known}:
            return name
    raise RuntimeError(f"no network interface of this machine has the address {host}")


@contextmanager
def exchange() -> Iterator[None]:
    """Raises ExchangeError where something is exchanged with a rank that is gone."""
    try:
        yield
    # the store and NCCL raise DistError, gloo an error that only its text tells from others
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            raise ExchangeError(" ".join(str(error).split())[:300]) from error
        raise


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor in the host's memory, which gloo moves whatever the dtype."""
    return torch.from_numpy(bytes_of(tensor))
