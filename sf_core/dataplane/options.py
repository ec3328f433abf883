"""The options of a data plane, which `sf dataplane` reads and passes to every part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Fsync = Literal["turn", "chunk", "group"]
"""Records forced to disk before they are forwarded: whole turns, each chunk of a stream too, or turns that
end within a few milliseconds together."""


@dataclass(frozen=True)
class DataplaneOptions:
    journal_dir: str | None = None
    """Folder of this data plane alone: started with it again, it continues with its runs. It also holds the
    journals of runs whose directory is not on a local disk."""
    fsync: Fsync = "turn"
    grace_s: float = 10.0
    """Seconds for which a turn goes on after its client went away, because the client may ask again."""
    memory_mb: float = 2048
    """Memory of open sessions and results above which nothing new is begun."""
    allowed_hosts: tuple[str, ...] = ()
    """Hosts, HOST or HOST:PORT, beside those of loopback, under which clients without a key may reach it."""
    max_connections: int | None = None
    """Most open connections. None: as many as the limit on open files allows, less a reserve for journals and
    tables."""
    request_timeout_s: float = 30.0
    """Seconds in which the head of a request must arrive, and then each piece of its body."""

    def __post_init__(self) -> None:
        """Raises ValueError for no memory, connections or time at all."""
        if not self.memory_mb > 0:
            raise ValueError(f"--memory-mb must be more than 0, got {self.memory_mb:g}")
        if self.max_connections is not None and self.max_connections < 1:
            raise ValueError(f"--max-connections must be at least 1, got {self.max_connections}")
        if not self.request_timeout_s > 0:
            raise ValueError(f"--request-timeout-s must be more than 0, got {self.request_timeout_s:g}")
