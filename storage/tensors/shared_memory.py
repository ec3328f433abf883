"""Weights in this host's memory, which processes of one user share.

Owns where they are and how they are found. What is found is what somebody says it is: the reader checks it.
"""

from __future__ import annotations

import glob
import mmap
import os
import tempfile
import weakref
from contextlib import suppress

from storage.scratch import PREFIX, scratch_folder
from storage.tensors.tensor_bytes import TensorBytes

SHARED_MEMORY_FOLDER = "/dev/shm"


def make_room(name: str, num_bytes: int, root: str) -> tempfile.TemporaryDirectory[str]:
    """A folder with a file of this name and size. Raises OSError if there is no room for it."""
    folder = scratch_folder(root)
    try:
        with open(os.path.join(folder.name, name), "wb") as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
    except OSError:
        folder.cleanup()
        raise
    return folder


def share(tensors: TensorBytes, digest: str) -> TensorBytes:
    """These tensors in shared memory, where they are found by their digest for as long as the result is used.
    If that has no room for them, they stay where they are."""
    try:
        folder = make_room("unfinished", len(tensors.data), SHARED_MEMORY_FOLDER)
    except OSError:
        return tensors
    path = os.path.join(folder.name, "unfinished")
    with open(path, "r+b") as file:
        file.write(tensors.data)
        file.flush()
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    os.rename(path, os.path.join(folder.name, digest))
    copy = TensorBytes(path, tensors.header, memoryview(data))
    weakref.finalize(copy, folder.cleanup)
    return copy


def find(digest: str) -> str | None:
    """Path of the tensors with this digest, one behind the other without a header, if a process of this user
    shares them."""
    for path in glob.glob(os.path.join(glob.escape(SHARED_MEMORY_FOLDER), f"{PREFIX}*", "*")):
        # it may be gone meanwhile
        with suppress(OSError):
            if os.path.basename(path) == digest and os.lstat(path).st_uid == os.getuid():
                return path
    return None
