"""The connections of a server: their limit, the ones that are closed for new ones, and the time limits of
those that must send more.

A connection is protected once one of its requests has shown a key, and while a request that needs no key is
answered. Other connections are strangers. They give way to new connections, the longest idle first.
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
"""Most connections over the limit that are being sent the refusal at a time."""

FEWEST_FILES = 64
MOST_FILES = 1024
"""Bounds of the open files that are left for journals and tables: a quarter of all."""

WARN_S = 60.0
"""Shortest time between two warnings, in seconds."""

NOTE_CALLER = "seamlessflow.note_caller"
"""ASGI extension of requests on a stranger's connection. Its `note` is called once the sender is known."""


def most_connections(asked: int | None) -> int:
    """Number of connections for which this process may open files: `asked`, or all but a reserve. Raises
    ValueError with one sentence if the process may not open so many files."""
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
    """Protect the connection of a request: for good if the request `shows_key`, otherwise until the request
    is answered."""
    extension = (scope.get("extensions") or {}).get(NOTE_CALLER)
    if extension is not None:
        extension["note"](shows_key)


class Connection(Protocol):
    def close_for_newcomer(self) -> None:
        """End at once."""

    def close_after_timeout(self) -> None:
        """End, because nothing more has arrived in time."""


class ConnectionLimits:
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
        """Add a new connection, one of `num_open`. Returns whether there is room for it."""
        self.start_timeout(newcomer)
        self._strangers[newcomer] = None
        num_protected = num_open - len(self._strangers)
        max_strangers = min(max(self.most - num_protected, MOST_REFUSED), MOST_STRANGERS)
        while len(self._strangers) > max_strangers:
            oldest = next(iter(self._strangers))
            self.remove(oldest)
            oldest.close_for_newcomer()
        return num_protected < self.most

    def protect(self, connection: Connection) -> None:
        """Protect the connection: it gives way to no other."""
        self._strangers.pop(connection, None)

    def unprotect(self, connection: Connection) -> None:
        """End the protection: the connection gives way again, after the other strangers."""
        self._strangers.pop(connection, None)
        self._strangers[connection] = None

    def start_timeout(self, connection: Connection, *, anew: bool = False) -> None:
        """Give the connection up unless it sends more in time. A time that is running already continues,
        unless it begins `anew`."""
        if anew:
            self._awaited.pop(connection, None)
        elif connection in self._awaited:
            return
        loop = asyncio.get_running_loop()
        self._awaited[connection] = due = loop.time() + self.request_timeout_s
        if self._timer is None:
            self._timer = loop.call_at(due, self._close_late)

    def stop_timeout(self, connection: Connection) -> None:
        """End the time limit of the connection."""
        self._awaited.pop(connection, None)

    def remove(self, connection: Connection) -> None:
        self._strangers.pop(connection, None)
        self._awaited.pop(connection, None)

    def warn(self) -> None:
        """Log that a connection was refused for lack of room, at most once per WARN_S."""
        now = asyncio.get_running_loop().time()
        if now >= self._warned_at + WARN_S:
            self._warned_at = now
            log.warning(
                "all %d connections are in use, so further ones are refused: raise the limit on open files "
                "(`ulimit -n`) or --max-connections",
                self.most,
            )

    def _close_late(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        late: list[Connection] = []
        for connection, due in self._awaited.items():
            if due > loop.time():
                self._timer = loop.call_at(due, self._close_late)
                break
            late.append(connection)
        for connection in late:
            del self._awaited[connection]
            connection.close_after_timeout()
