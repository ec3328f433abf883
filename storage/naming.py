"""Gives a finished local file a name that no file bears yet, in one step: of two that try, one wins.

Owns what file systems offer for that. Knows nothing of what is in the file.
"""

from __future__ import annotations

import ctypes
import errno
import os

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
"""What link says where there are no hard links: on exFAT and FAT, and on many mounts of other stores."""

_NO_SUCH_RENAME = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)

_AT_FDCWD, _RENAME_NOREPLACE = -100, 1

# os has no rename that keeps what is there; other systems than Linux have no such call
_renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)


def name_new(temporary: str, path: str) -> None:
    """Raises FileExistsError if a file of that name is there, and OSError if the file system has no way to
    tell. The temporary name may stay."""
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
        # no lock file instead: that of a killed process stays, and most such mounts lock on one host only
        raise OSError(
            "this file system has neither hard links nor a rename that keeps an existing file, so of two "
            "attempts on a run both could win; use a local disk, NFS or the store's own URL"
        )
    raise OSError(code, os.strerror(code), temporary, None, path)
