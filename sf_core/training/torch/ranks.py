"""The ranks of a gang: what they exchange in a train step, and how they meet, stay together and part.

They exchange small values and slices of tensors, beside what a sharded model exchanges by itself.

Rank 0 opens a store on its worker's address and announces it in the run directory. Every rank reports to the
store; rank 0 names the process group to use: the one that all of them still have, or a new one. Every wait
that exceeds `timeout_s` raises an error with the names of the missing ranks.
"""

from __future__ import annotations

import functools
import os
import secrets
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

from sf_core.training.gang import GangError, RankAssignment, wait_for
from storage.gangs import GangFiles
from storage.tensors.checkpoints import Slices
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


CONNECT_S = 5.0
"""How long to try to connect: rank 0 announces its store only once it listens."""

ROLL_CALL_S = 5.0
"""How long after a failed exchange the other ranks have to show that they are alive. All exchanges fail
almost at once, because a failing rank closes its connections."""

_FAILED = "failed"
"""Key for the number of a rank that has failed, and why."""


class Rendezvous:
    """The process group of this process, kept from step to step while its members stay."""

    def __init__(self) -> None:
        self._group: ProcessGroup | None = None
        """None during a step."""
        self._last: _Meeting | None = None
        """While rank 0 is alive, the others can read in its store how the last step ended."""

    @contextmanager
    def meet(
        self, files: GangFiles, assignment: RankAssignment, host: str, timeout_s: float
    ) -> Iterator[Ranks]:
        """The `meet` of a TrainerBackend."""
        kept = self._group
        self._group = None
        if assignment.is_alone:
            if kept is not None:
                _leave()
            yield SingleRank()
            return
        self._last = None
        self._last = meeting = _Meeting(files, assignment, host, timeout_s)
        try:
            group = meeting.join(kept)
            yield group
            meeting.end()
        except ExchangeError as error:
            _leave()
            raise meeting.roll_call(error) from error
        except BaseException as error:
            _leave()
            meeting.report_failure(error)
            raise
        self._group = group

    def close(self) -> None:
        """Leave the group, unless a step uses it."""
        if self._group is not None:
            self._group = None
            _leave()


class _Meeting:
    """One step's use of the store."""

    def __init__(self, files: GangFiles, assignment: RankAssignment, host: str, timeout_s: float) -> None:
        self._files = files
        self._assignment = assignment
        self._host = host
        self._timeout_s = timeout_s
        self._store: dist.Store | None = None

    def join(self, resident: ProcessGroup | None) -> ProcessGroup:
        """The process group of this step: the resident one if all ranks still have it."""
        self._open_store()
        kept = resident.group if resident and resident.workers == self._assignment.workers else "none"
        self._put(f"here/{self._assignment.rank}", kept)
        if self._assignment.rank == 0:
            self._await("here", self._assignment.other_ranks, "has not begun")
            same = (
                all(self._get(f"here/{rank}") == kept for rank in self._assignment.other_ranks)
                and kept != "none"
            )
            self._put("group/0", kept if same else secrets.token_hex(8))
        else:
            self._await("group", [0], "has not gathered the ranks")
        group = self._get("group/0")
        if resident is not None and resident.group == group:
            return resident
        _leave()
        self._make_group(group)
        return ProcessGroup(group, self._assignment.workers, self._timeout_s)

    def end(self) -> None:
        """Tell the other ranks that rank 0 has committed; they wait for it."""
        if self._assignment.rank == 0:
            self._put("committed/0", "")
        else:
            self._await("committed", [0], "has not committed the step")

    def report_failure(self, error: BaseException) -> None:
        """Tell the other ranks, unless it is the store that failed."""
        try:
            self._put(_FAILED, f"{self._assignment.rank} {type(error).__name__}: {error}")
        except GangError:
            return

    def roll_call(self, error: ExchangeError) -> GangError:
        """The error that names the ranks that are missing after an exchange failed."""
        self._timeout_s = ROLL_CALL_S
        try:
            self._put(f"after/{self._assignment.rank}", "")
            self._await("after", self._assignment.other_ranks, "does not answer since an exchange failed")
        except GangError as missing:
            return GangError(f"{missing} ({error})")
        return GangError(f"{self._assignment.label}: an exchange failed, but no rank is missing: {error}")

    def _open_store(self) -> None:
        if self._assignment.rank == 0:
            # a socket of our own: the store by itself listens on every interface of the machine
            with socket.create_server((self._host, 0)) as server:
                port = server.getsockname()[1]
                self._store = self._connect(self._host, port, server.detach())
            self._files.announce(self._host, port)
        else:
            address = wait_for(
                self._files,
                self._assignment,
                self._files.address,
                lambda: [0],
                "has not begun",
                self._timeout_s,
            )
            self._store = self._connect(*address)

    def _connect(self, host: str, port: int, listening: int | None = None) -> dist.Store:
        with self._blame_rank_0():
            return dist.TCPStore(
                host,
                port,
                is_master=listening is not None,
                wait_for_workers=False,
                timeout=timedelta(seconds=min(self._timeout_s, CONNECT_S)),
                master_listen_fd=listening,
            )

    def _make_group(self, group: str) -> None:
        store = dist.PrefixStore(group, self._opened)
        assignment = self._assignment
        try:
            make_group(store, assignment.rank, len(assignment.workers), self._host, self._timeout_s)
        except RuntimeError as error:
            raise ExchangeError(f"the process group cannot be made: {error}") from error

    def _put(self, key: str, value: str) -> None:
        with self._blame_rank_0():
            self._opened.set(key, value)

    def _get(self, key: str) -> str:
        with self._blame_rank_0():
            return str(self._opened.get(key), "utf-8")

    def _has(self, *keys: str) -> bool:
        """Whether the store has all of these."""
        with self._blame_rank_0():
            return bool(self._opened.check(list(keys)))

    @property
    def _opened(self) -> dist.Store:
        if self._store is None:
            raise GangError(f"{self._assignment.label}: no connection to rank 0")
        return self._store

    @contextmanager
    def _blame_rank_0(self) -> Iterator[None]:
        """Blame rank 0 for errors of the store, which is in its process."""
        try:
            yield
        except dist.DistError as error:
            raise self._assignment.blame([0], f"is gone: {' '.join(str(error).split())[:200]}") from error

    def _await(self, key: str, ranks: list[int], what: str) -> None:
        """Wait until each of these ranks has put its key; raises GangError if a rank has failed. Asks the
        store once or twice at a time, however many ranks there are."""

        def missing() -> list[int]:
            return [rank for rank in ranks if not self._has(f"{key}/{rank}")]

        def look() -> bool | None:
            if self._has(_FAILED):
                rank, _, why = self._get(_FAILED).partition(" ")
                raise self._assignment.blame([int(rank)], f"failed: {why}")
            return self._has(*(f"{key}/{rank}" for rank in ranks)) or None

        wait_for(self._files, self._assignment, look, missing, what, self._timeout_s)


def _leave() -> None:
    """Close the process group, so that ranks waiting in an exchange with this one fail at once."""
    if dist.is_initialized():
        dist.destroy_process_group()
