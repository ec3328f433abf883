"""The connections of a server: how many there may be, which of them give way, and which must send more.

A connection keeps its place once one of its requests has shown a key, and as long as one that needs no key is
answered. The others are strangers and give way to new connections, the longest idle first.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import Protocol

from starlette.types import Scope

log = logging.getLogger(__name__)

MOST_STRANGERS = 2048
"""As many as wait to be accepted: what strangers have sent so far takes memory."""

MOST_REFUSED = 16
"""Connections beyond all places that are told so, at a time."""

FEWEST_FILES = 64
MOST_FILES = 1024
"""Bounds of the open files that are left for journals and tables: a quarter of all."""

WARN_S = 60.0
"""Shortest time between two warnings, in seconds."""

NOTE_CALLER = "seamlessflow.note_caller"
"""ASGI extension of requests on a stranger's connection: its `note` is told who the sender is."""


def most_connections(asked: int | None) -> int:
    """Connections for which this process may open files: those that are asked for, or all but a reserve.
    Raises ValueError, one sentence, if it may not open as many files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_files = 2**20 if soft == resource.RLIM_INFINITY else soft
    reserve = min(max(num_files // 4, FEWEST_FILES), MOST_FILES)
    if asked is None:
        return max(num_files - reserve, 1)
    if asked > num_files - FEWEST_FILES:
        raise ValueError(
            f"--max-connections {asked} needs {asked + FEWEST_FILES} open files, but this process may open "
            f"{num_files}: raise that limit with `ulimit -n`, or choose fewer connections"
        )
    return asked


def note_caller(scope: Scope, *, shows_key: bool) -> None:
    """Let the connection of a request keep its place: from now on if the request `shows_key`, otherwise until
    the request is answered."""
    extension = (scope.get("extensions") or {}).get(NOTE_CALLER)
    if extension is not None:
        extension["note"](shows_key)


class Connection(Protocol):
    def give_way(self) -> None:
        """End at once."""

    def give_up(self) -> None:
        """End, because nothing more has arrived in time."""


class Connections:
    def __init__(self, most: int, request_timeout_s: float) -> None:
        self.most = most
        self.request_timeout_s = request_timeout_s
        self._strangers: dict[Connection, None] = {}
        """The longest idle first."""
        self._awaited: dict[Connection, float] = {}
        """Times by which connections must send more, on the clock of the event loop; the earliest first."""
        self._timer: asyncio.TimerHandle | None = None
        self._warned_at = -WARN_S

    def add(self, newcomer: Connection, num_open: int) -> bool:
        """Find a place for a new connection, one of `num_open`. Returns whether there is one."""
        self.wait_for(newcomer)
        self._strangers[newcomer] = None
        num_kept = num_open - len(self._strangers)
        room = min(max(self.most - num_kept, MOST_REFUSED), MOST_STRANGERS)
        while len(self._strangers) > room:
            oldest = next(iter(self._strangers))
            self.forget(oldest)
            oldest.give_way()
        return num_kept < self.most

    def keep(self, connection: Connection) -> None:
        """Have it give way to nobody."""
        self._strangers.pop(connection, None)

    def make_stranger(self, connection: Connection) -> None:
        """Have it give way again, after the other strangers."""
        self._strangers.pop(connection, None)
        self._strangers[connection] = None

    def wait_for(self, connection: Connection, *, anew: bool = False) -> None:
        """Give it up unless it sends more in time. If that is so already, the time stays, unless it begins
        `anew`."""
        if anew:
            self._awaited.pop(connection, None)
        elif connection in self._awaited:
            return
        loop = asyncio.get_running_loop()
        self._awaited[connection] = due = loop.time() + self.request_timeout_s
        if self._timer is None:
            self._timer = loop.call_at(due, self._give_up)

    def settle(self, connection: Connection) -> None:
        """Wait for it no longer."""
        self._awaited.pop(connection, None)

    def forget(self, connection: Connection) -> None:
        self._strangers.pop(connection, None)
        self._awaited.pop(connection, None)

    def warn(self) -> None:
        """Log that a connection found no place, now and then."""
        now = asyncio.get_running_loop().time()
        if now >= self._warned_at + WARN_S:
            self._warned_at = now
            log.warning(
                "all %d connections are in use, so further ones are refused: raise the limit on open files "
                "(`ulimit -n`) or --max-connections",
                self.most,
            )

    def _give_up(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        late: list[Connection] = []
        for connection, due in self._awaited.items():
            if due > loop.time():
                self._timer = loop.call_at(due, self._give_up)
                break
            late.append(connection)
        for connection in late:
            del self._awaited[connection]
            connection.give_up()
