"""What killed writers have left: temporary files on a local disk, and uploads in parts on S3.

Object stores of other kinds keep nothing of an upload that has not ended, or show no part of it to clients.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from storage.errors import storage_errors
from storage.files import is_local, join, open_fs

OLD_S = 24 * 3600.0
"""Age from which a file without a lock, or an upload, is no longer being written."""

YOUNG_S = 60.0
"""Age up to which a file may not be locked yet."""

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{32}\.tmp")


@dataclass(frozen=True, slots=True)
class Upload:
    """An upload in parts that has not ended."""

    uri: str
    """That of the file that was to appear."""
    id: str
    bytes: int
    """Size of the parts that have arrived."""

    def abort(self) -> None:
        """Remove the parts. An upload that is gone is no error."""
        fs, path = open_fs(self.uri)
        bucket, key, _ = fs.split_path(path)
        with suppress(FileNotFoundError), storage_errors(self.uri):
            fs.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=self.id)


def list_unfinished(folder: str) -> list[str]:
    """Temporary files in a local folder and below that no process is writing, sorted; of an object store,
    none."""
    if not is_local(folder):
        return []
    walked = os.walk(open_fs(folder)[1])
    temporary_files = (
        join(place, name) for place, _, names in walked for name in names if _TEMPORARY.fullmatch(name)
    )
    return sorted(path for path in temporary_files if _is_abandoned(path))


def list_uploads(folder: str, older_than_s: float = OLD_S) -> list[Upload]:
    """Uploads in parts into a folder on S3 and below that began this long ago, sorted. Of other storages, and
    where the credentials or the server do not allow to list them, none. Raises StorageError if the storage
    fails."""
    fs, path = open_fs(folder)
    if "s3" not in fs.protocol:
        return []
    bucket, prefix, _ = fs.split_path(path)
    with storage_errors(folder):
        try:
            return sorted(_uploads(fs, bucket, prefix.rstrip("/") + "/", time.time() - older_than_s), key=str)
        except PermissionError:
            return []
        except OSError as error:
            # some servers with the API of S3 cannot list them
            if error.errno != errno.ENOSYS:
                raise
            return []


def _uploads(fs: Any, bucket: str, prefix: str, before: float) -> Iterator[Upload]:
    for upload in _pages(fs, "list_multipart_uploads", "Uploads", Bucket=bucket, Prefix=prefix):
        began: datetime = upload["Initiated"]
        if began.timestamp() < before:
            named = {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
            sizes = (part["Size"] for part in _pages(fs, "list_parts", "Parts", **named))
            yield Upload(f"s3://{bucket}/{upload['Key']}", upload["UploadId"], sum(sizes))


_MARKERS = {"Uploads": ("KeyMarker", "UploadIdMarker"), "Parts": ("PartNumberMarker",)}


def _pages(fs: Any, call: str, kind: str, **query: Any) -> Iterator[dict[str, Any]]:
    """What all pages of an answer list."""
    page: dict[str, Any] = {"IsTruncated": True}
    while page["IsTruncated"]:
        markers = {name: page[f"Next{name}"] for name in _MARKERS[kind] if f"Next{name}" in page}
        page = fs.call_s3(call, **query, **markers)
        yield from page.get(kind, ())


def _is_abandoned(path: str) -> bool:
    """Whether no process writes the file: a writer locks it soon. Without locks, its age tells."""
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False
    age_s = time.time() - os.fstat(file).st_mtime
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return age_s > OLD_S
    finally:
        os.close(file)
    return age_s > YOUNG_S
