"""What a command needs of the place where it is called, asked before it starts anything: names that are free,
open files enough, folders that can be written.
"""

from __future__ import annotations

import resource
import tempfile
from collections.abc import Iterable
from importlib.machinery import PathFinder
from pathlib import Path

NAMES = ("flows", "tasks", "storage", "sf_core")
"""Our packages. These are common names, and what is first on the path is imported."""

ROOT = Path(__file__).resolve().parents[2]

OPEN_FILES = 4096
"""So many are asked for: sockets count, and a data plane has one for each request that waits."""
FEWEST_OPEN_FILES = 1024
"""With fewer, supervisord refuses to start."""


PREFECT_HOME = ("PREFECT_HOME", "where Prefect keeps its database")
CACHE_DIR = ("SF_CACHE_DIR", "where policies that were warm-started are kept")


def check_names(path: Iterable[str]) -> None:
    """Raises ImportError, one sentence, if something else would be imported by a name of ours in a process
    that looks in these places, which are the entries of its `sys.path`."""
    places = list(path)
    for name in NAMES:
        spec = PathFinder.find_spec(name, places)
        # None: it is installed from a clone, by a finder that is asked after all places
        if spec is None:
            continue
        # a folder without __init__.py, such as one of data, has no origin
        found = Path(spec.origin or next(iter(spec.submodule_search_locations or [name]))).resolve()
        if not found.is_relative_to(ROOT):
            raise ImportError(
                f"{found} has the name of a package of SeamlessFlow, {name} ({ROOT / name}), and would be "
                "imported in its place: rename it, or call the command in another folder and keep this one "
                "out of PYTHONPATH"
            )


def raise_open_files() -> None:
    """Let this process and what it starts have as many open files as they may need and the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def check_open_files() -> None:
    """Raises OSError, one sentence, if a stack cannot start with so few."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < FEWEST_OPEN_FILES:
        raise OSError(
            f"this process may have {soft} files open, and a stack needs {FEWEST_OPEN_FILES}: "
            f"`ulimit -n {OPEN_FILES}`, or raise the hard limit (`nofile` in /etc/security/limits.conf, "
            "LimitNOFILE of systemd)"
        )


def check_place(folder: Path, variable: str, purpose: str) -> None:
    """Raises OSError, one sentence, if nothing can be written into the folder, which the environment variable
    sets."""
    if reason := why_not_writable(folder):
        raise OSError(f"{folder}, {purpose}, cannot be written ({reason}): set {variable} to another folder")


def why_not_writable(folder: Path) -> str | None:
    """The system's reason, None if files can be made there; makes the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return str(error.strerror)
    return None
