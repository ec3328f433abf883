"""Limits on all that is in a sandbox together, by a control group of version 2, where this process may make
one: its own group, or the one above, has `memory` and `pids` for groups below it and is this user's. Those of
systemd's user sessions are; in most containers there is none.

By the kernel's documentation, cgroup-v2.rst. The tests have plain folders in its place: their hosts may have
none of version 2.
"""

from __future__ import annotations

import os
from contextlib import suppress
from itertools import count
from pathlib import Path

from sf_core.config.programs import SandboxLimits

MOUNT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
"""Tells the group of this process."""

SPARE_MB = 32
"""Memory of a sandbox's group above its limit: the porter ends what goes beyond the limit, and the kernel
what is faster than the porter looks."""

_PREFIX = "sf-sandbox-"

_numbers = count()


def parent_group() -> Path | None:
    """The group in which groups with limits can be made."""
    with suppress(OSError):
        for line in OWN.read_text(encoding="utf-8").splitlines():
            if line.startswith("0::/"):
                own = MOUNT / line.removeprefix("0::/")
                return next((group for group in (own, own.parent) if _can_limit(group)), None)
    return None


class ControlGroup:
    def __init__(self, parent: Path, limits: SandboxLimits) -> None:
        _remove_left(parent)
        self._folder = parent / f"{_PREFIX}{os.getpid()}-{next(_numbers)}"
        self._folder.mkdir()
        memory = str((limits.memory_mb + SPARE_MB) * 2**20)
        # bubblewrap and the porter are in it too
        for name, most in (
            ("memory.max", memory),
            ("memory.swap.max", "0"),
            ("pids.max", limits.processes + 2),
        ):
            # there is no limit on swap where there is no swap
            with suppress(FileNotFoundError):
                (self._folder / name).write_text(f"{most}", encoding="utf-8")

    def join(self, words: list[str]) -> list[str]:
        """A command line that runs these words in the group."""
        return ["/bin/sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(self._folder), *words]

    def num_killed(self) -> int:
        """Number of processes that were killed because there was no memory left."""
        with suppress(OSError, ValueError):
            for line in (self._folder / "memory.events").read_text(encoding="utf-8").splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
        return 0

    def remove(self) -> None:
        """Once nothing runs in it."""
        with suppress(OSError):
            self._folder.rmdir()


def _can_limit(group: Path) -> bool:
    with suppress(OSError):
        controllers = (group / "cgroup.subtree_control").read_text(encoding="utf-8").split()
        if not {"memory", "pids"}.issubset(controllers):
            return False
        return os.access(group, os.W_OK) and os.access(group / "cgroup.procs", os.W_OK)
    return False


def _remove_left(parent: Path) -> None:
    """Remove the groups of processes that were killed; those in use cannot be removed."""
    for group in parent.glob(f"{_PREFIX}*"):
        if not Path("/proc", group.name.removeprefix(_PREFIX).partition("-")[0]).exists():
            with suppress(OSError):
                group.rmdir()
