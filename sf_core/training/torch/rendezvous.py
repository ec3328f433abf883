"""How the ranks of a gang meet, stay together and part.

Rank 0 opens a store on its worker's address and announces it in the run directory. Every rank reports to the
store; rank 0 names the process group to use: the one that all of them still have, or a new one. Every wait
that exceeds `timeout_s` raises an error with the names of the missing ranks.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from sf_core.training.gang import GangError, RankAssignment, wait_for
from sf_core.training.torch.ranks import ExchangeError, ProcessGroup, Ranks, SingleRank, make_group
from storage.gangs import GangFiles

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
