"""The options of a data plane, which `sf dataplane` takes and every part of it is given."""

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

    def __post_init__(self) -> None:
        """Raises ValueError for no memory at all."""
        if not self.memory_mb > 0:
            raise ValueError(f"--memory-mb must be more than 0, got {self.memory_mb:g}")
