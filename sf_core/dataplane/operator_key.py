"""The operator's key, which opens every route of a data plane.

The key is SF_DATAPLANE_KEY. If this variable is not set, a data plane on loopback makes a key for the
user's account, in a file that only this account can read. All data planes and commands of the account share
it.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from sf_core.config.addresses import is_loopback
from sf_core.process.environment_variables import configured_dataplane_key, why_not_writable
from storage.files import read_bytes


def key_file() -> Path:
    """File of the account's key, in the user's folder of configuration."""
    folder = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(folder, "seamlessflow", "dataplane.key")


def operator_key(url: str) -> str | None:
    """The key for the data plane at this URL; None if this process knows none. The account's key is for this
    machine only."""
    if (configured := configured_dataplane_key()) is not None:
        return configured
    if not is_loopback(urlsplit(url).hostname or ""):
        return None
    with suppress(OSError):
        return _read(key_file()) or None
    return None


def account_key() -> str:
    """The account's key, made if there is none. Raises OSError if the file cannot be written, and ValueError,
    one sentence, if another user could read or replace it."""
    file = key_file()
    if reason := why_not_writable(file.parent):
        raise OSError(
            f"{file.parent}, where the key of your data planes is kept, cannot be written ({reason}): set "
            "SF_DATAPLANE_KEY to a key of your own"
        )
    if not file.exists():
        _make(file)
    status = file.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ValueError(
            f"{file}, the key of your data planes, is open to other users: remove the file; the next data "
            "plane then makes another key"
        )
    if not (key := _read(file)):
        raise ValueError(f"{file}, the key of your data planes, is empty: remove the file")
    return key


def _read(file: Path) -> str:
    return read_bytes(str(file)).decode().strip()


def _make(file: Path) -> None:
    """Write a new key, unless another process does so first."""
    temporary = file.with_name(f"{file.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "w", encoding="utf-8") as opened:
            opened.write(secrets.token_hex(16))
        # never replaces the key with which another data plane serves already
        with suppress(FileExistsError):
            os.link(temporary, file)
    finally:
        temporary.unlink()
