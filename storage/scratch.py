"""Temporary folders under TMPDIR: copies from an object store, and files on their way to one.

A process that is killed removes nothing. A folder is therefore locked while its process lives, and whoever
makes the next one removes those that nobody holds.
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

_PREFIX = "sf-scratch-"

_YOUNG_S = 60.0
"""A folder that was made so recently may not be locked yet."""


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """A new folder; it goes when it is closed or nobody refers to it."""
    for left in glob.glob(os.path.join(glob.escape(tempfile.gettempdir()), f"{_PREFIX}*")):
        # somebody else's, or gone by now
        with suppress(OSError):
            _remove_if_abandoned(left)
    folder = tempfile.TemporaryDirectory(prefix=_PREFIX)
    fcntl.flock(lock := os.open(folder.name, os.O_RDONLY), fcntl.LOCK_SH)
    weakref.finalize(folder, os.close, lock)
    return folder


def _remove_if_abandoned(folder: str) -> None:
    """Raises OSError if it is not ours to remove."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if time.time() - os.fstat(lock).st_mtime > _YOUNG_S:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
    finally:
        os.close(lock)
