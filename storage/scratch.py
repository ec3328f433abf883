"""Temporary folders, for copies from an object store, files on their way to one, and weights in memory.

A killed process removes nothing. A folder is therefore locked while its process lives, and the process that
makes the next folder removes the unlocked ones.
"""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import tempfile
import time
import weakref
from contextlib import suppress

PREFIX = "sf-scratch-"

_YOUNG_S = 60.0
"""Age up to which a folder may not be locked yet."""


def scratch_folder(root: str | None = None) -> tempfile.TemporaryDirectory[str]:
    """A new folder, by default under TMPDIR, removed when it is closed or garbage-collected."""
    root = root or tempfile.gettempdir()
    for other in glob.glob(os.path.join(glob.escape(root), f"{PREFIX}*")):
        # of another user, or removed meanwhile
        with suppress(OSError):
            _remove_if_abandoned(other)
    folder = tempfile.TemporaryDirectory(prefix=PREFIX, dir=root)
    fcntl.flock(lock := os.open(folder.name, os.O_RDONLY), fcntl.LOCK_SH)
    weakref.finalize(folder, os.close, lock)
    return folder


def _remove_if_abandoned(folder: str) -> None:
    """Raises OSError if the folder is in use or belongs to another user."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if time.time() - os.fstat(lock).st_mtime > _YOUNG_S:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
    finally:
        os.close(lock)
