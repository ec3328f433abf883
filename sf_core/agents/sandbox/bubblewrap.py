"""Sandboxes by bubblewrap: what they see of the host."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath

from sf_core.agents.sandbox import porter
from sf_core.config.programs import WORK, SandboxLimits

PORTER = "/porter.py"
"""Where the porter's source is, inside."""

CHANNEL = 0
"""Number of the porter's channel, which is standard input."""

SHARED_MEMORY_MB = 64

SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")
"""Parts of the host's system beside /usr; on most hosts they lead there."""

SHOWN = ("/etc/ld.so.cache", "/etc/alternatives")
"""What its programs need of /etc."""

PYTHON = ("bin", "lib", "lib64", "pyvenv.cfg")
"""Parts of a Python's prefix."""

MADE_UP = Path(__file__).with_name("etc")
"""Further files of /etc that programs look for, with nothing of the host in them."""


def command_line(limits: SandboxLimits, words: Sequence[str], programs: Iterable[str] = ()) -> list[str]:
    """The command line of a sandbox that runs these words as its first process. Its standard input becomes
    the open file CHANNEL inside. `programs`: files of the host that are seen too, where they are."""
    # not the parent's death as a signal: it is sent when the thread ends that has started the sandbox
    options = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    options += ["--as-pid-1", "--hostname", "sandbox", "--clearenv"]
    if os.getuid() != 0:
        user = str(porter.USER)
        options += ["--unshare-user", "--disable-userns", "--uid", user, "--gid", user]
    options += ["--proc", "/proc", "--dev", "/dev"]
    options += _in_memory(WORK, limits.disk_mb, "0755")
    options += _in_memory("/tmp", limits.disk_mb, "1777")
    options += _in_memory(porter.SHARED, SHARED_MEMORY_MB, "1777")
    options += _system()
    for path in _without_inner({*_python(), *limits.paths, *programs}):
        if not path.is_relative_to("/usr") and path.parent not in map(Path, SYSTEM):
            options += _read_only(path)
    for folder in filter(os.path.isdir, limits.hidden):
        options += ["--tmpfs", folder, "--remount-ro", folder]
    options += ["--ro-bind", porter.__file__, PORTER]
    # or everybody with the rights of their owner could fill them without a limit
    options += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORK]
    return [program(), *options, "--", *words]


def program() -> str:
    """Raises FileNotFoundError, one sentence, if there is none."""
    program = shutil.which("bwrap")
    if program is None:
        raise FileNotFoundError("bubblewrap is not installed on this host (Debian package: bubblewrap)")
    return program


def python() -> str:
    """The Python that runs the porter."""
    return os.path.realpath(sys.executable)


def variables() -> dict[str, str]:
    """The variables of every command inside."""
    prefixes = dict.fromkeys((sys.prefix, sys.base_prefix, "/usr/local", "/usr", ""))
    path = ":".join(f"{prefix}/bin" for prefix in prefixes)
    return {"PATH": path, "HOME": porter.HOME, "TMPDIR": "/tmp", "LANG": "C.UTF-8"}


def _in_memory(folder: str, size_mb: int, mode: str) -> list[str]:
    return ["--perms", mode, "--size", str(size_mb * 2**20), "--tmpfs", folder]


def _system() -> list[str]:
    options = ["--ro-bind", "/usr", "/usr"]
    for path in SYSTEM:
        if os.path.islink(path):
            options += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            options += ["--ro-bind", path, path]
    options += ["--perms", "0755", "--dir", "/etc"]
    for path in SHOWN:
        options += ["--ro-bind-try", path, path]
    for file in MADE_UP.iterdir():
        options += ["--ro-bind", str(file), f"/etc/{file.name}"]
    return options


def _python() -> list[str]:
    """Parts of the worker's Python; a prefix may be somebody's home."""
    parts = [f"{prefix}/{name}" for prefix in (sys.prefix, sys.base_prefix) for name in PYTHON]
    return [part for part in parts if os.path.exists(part)]


def _read_only(path: PurePath) -> list[str]:
    options = []
    # else as closed as on the host
    for parent in list(path.parents)[-2::-1]:
        options += ["--perms", "0755", "--dir", str(parent)]
    return [*options, "--ro-bind", str(path), str(path)]


def _without_inner(paths: Iterable[str]) -> list[Path]:
    """The paths, sorted, without those below another of them."""
    outermost: list[Path] = []
    for path in sorted(map(Path, paths)):
        if not any(path.is_relative_to(other) for other in outermost):
            outermost.append(path)
    return outermost
