"""Renames a finished local file to a name that must not exist yet, atomically: of two writers, one wins.

Owns the system calls for that. Knows nothing of the content of the file.
"""

from __future__ import annotations

import ctypes
import errno
import os

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
"""Errors of link() without hard links: on exFAT and FAT, and on many mounted object stores."""

_NO_SUCH_RENAME = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1

# the os module has no rename that keeps an existing file; only Linux has this call
_renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)


def name_new(temporary: str, path: str) -> None:
    """Raises FileExistsError if `path` exists, and OSError if the file system has no way to tell. The
    temporary name may stay."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _rename_new(temporary, path)


def _rename_new(temporary: str, path: str) -> None:
    code = errno.ENOSYS
    if _renameat2 is not None:
        names = _AT_FDCWD, os.fsencode(temporary), _AT_FDCWD, os.fsencode(path)
        if _renameat2(*names, _RENAME_NOREPLACE) == 0:
            return
        code = ctypes.get_errno()
    if code in _NO_SUCH_RENAME:
        # not a lock file: that of a killed process stays, and most such mounts lock on one host only
        raise OSError(
            "this file system has neither hard links nor a rename that keeps an existing file, so two "
            "attempts on a run could both commit: set storage.root to a local disk, to NFS, or, if this is a "
            "mounted object store, to the URL of the object store"
        )
    raise OSError(code, os.strerror(code), temporary, None, path)
