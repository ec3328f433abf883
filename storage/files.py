"""Whole files on any fsspec filesystem, each written atomically.

Owns atomic writes, checksums and URIs. Knows nothing of what the files mean. Object stores have no rename:
there a file appears when its upload is complete.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, BinaryIO

import fsspec
from fsspec.implementations.local import LocalFileSystem

from storage.errors import StorageError, storage_errors
from storage.naming import name_new
from storage.scratch import scratch_folder

_OPTIONS: dict[str, dict[str, Any]] = {
    # s3fs retries five times itself; with retries inside each of them, an error would take minutes
    "s3": {"config_kwargs": {"retries": {"total_max_attempts": 1}}},
}

_PIECE_BYTES = 16 * 2**20

_UNFINISHED = re.compile(r"\..+\.[0-9a-f]{32}\.tmp")

_fence: ContextVar[Callable[[], None]] = ContextVar("fence", default=lambda: None)


@dataclass(frozen=True, slots=True)
class FileRef:
    """Reference to a written file, with the size and checksum that a reader must find."""

    uri: str
    """URI of the file; in manifests relative to their run directory."""
    bytes: int
    sha256: str


def open_fs(uri: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The filesystem of a URI or local path, and the path on it."""
    options = _OPTIONS.get(uri.partition("://")[0], {})
    try:
        # other processes write the same folders: a cached listing would hide their files
        fs, path = fsspec.core.url_to_fs(uri, use_listings_cache=False, **options)
    except ImportError as error:
        raise StorageError(f"{uri}: this storage needs a package that is not installed: {error}") from None
    except ValueError as error:
        raise StorageError(f"{uri}: fsspec does not know this kind of storage: {error}") from None
    return fs, path


def is_local(uri: str) -> bool:
    return isinstance(open_fs(uri)[0], LocalFileSystem)


def absolute(uri: str) -> str:
    """The absolute path of a local file, so that it means the same in every process; else the URI."""
    fs, path = open_fs(uri)
    return path if isinstance(fs, LocalFileSystem) else uri.rstrip("/")


def join(base: str, *parts: str) -> str:
    return "/".join([base.rstrip("/"), *parts])


def exists(uri: str) -> bool:
    fs, path = open_fs(uri)
    with storage_errors(uri):
        return bool(fs.exists(path))


def read_bytes(uri: str) -> bytes:
    """Raises FileNotFoundError."""
    fs, path = open_fs(uri)
    with storage_errors(uri):
        return bytes(fs.cat_file(path))


def read_if_there(uri: str) -> bytes | None:
    """Content of the file, None if there is none."""
    with suppress(FileNotFoundError):
        return read_bytes(uri)
    return None


def size(uri: str) -> int:
    """Raises FileNotFoundError."""
    fs, path = open_fs(uri)
    with storage_errors(uri):
        return int(fs.size(path))


def describe(uri: str) -> FileRef:
    """Reference to the file as it is now, read piece by piece. Raises FileNotFoundError."""
    with open_read(uri) as file:
        hashed = HashedFile(file)
        while hashed.read(_PIECE_BYTES):
            pass
    return hashed.ref(uri)


def pieces(file: BinaryIO) -> Iterator[bytes]:
    """What is left of an open file, in pieces that are no burden to memory."""
    return iter(lambda: file.read(_PIECE_BYTES), b"")


@contextmanager
def open_read(uri: str) -> Iterator[BinaryIO]:
    """Open the file to read parts of it, without read-ahead. Raises FileNotFoundError."""
    fs, path = open_fs(uri)
    with storage_errors(uri), fs.open(path, "rb", cache_type="none") as file:
        yield file


def write_atomic(uri: str, data: bytes, *, create: bool = False) -> FileRef:
    """Write the whole file or nothing. With `create` an existing file is kept and FileExistsError raised,
    even if two processes write at the same moment."""
    fs, path = open_fs(uri)
    with storage_errors(uri):
        if isinstance(fs, LocalFileSystem):
            with _local_file(path, create) as file:
                file.write(data)
        else:
            _fence.get()()
            fs.pipe_file(path, data, mode="create" if create else "overwrite")
    return FileRef(uri, len(data), hashlib.sha256(data).hexdigest())


@contextmanager
def fence(check: Callable[[], None]) -> Iterator[None]:
    """For writes of this thread in the block, call `check` directly before each file appears; if it raises,
    the previous file stays. On an object store it is called before the upload."""
    token = _fence.set(check)
    try:
        yield
    finally:
        _fence.reset(token)


class HashedFile:
    """A file that is written, or read, from its beginning to its end, which counts its size and computes its
    checksum meanwhile."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._size = 0

    def write(self, data: bytes | memoryview) -> int:
        self._hash.update(data)
        self._size += len(data)
        return self._file.write(data)

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self._hash.update(data)
        self._size += len(data)
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Only to look at the end and come back: what is skipped is not counted."""
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        self._file.flush()

    @property
    def closed(self) -> bool:
        return self._file.closed

    def ref(self, uri: str) -> FileRef:
        return FileRef(uri, self._size, self._hash.hexdigest())


@contextmanager
def writer(uri: str) -> Iterator[HashedFile]:
    """Like write_atomic, for a file that is never whole in memory: it appears when the block has ended. For
    an object store it is gathered in a temporary file (TMPDIR) and uploaded in parts."""
    fs, path = open_fs(uri)
    if isinstance(fs, LocalFileSystem):
        with storage_errors(uri), _local_file(path) as file:
            yield HashedFile(file)
        return
    with scratch_folder() as folder, open(os.path.join(folder, "upload"), "wb") as temporary:
        yield HashedFile(temporary)
        temporary.flush()
        _fence.get()()
        with storage_errors(uri):
            fs.put_file(temporary.name, path)


def check_writable(folder: str) -> None:
    """Raises StorageError if files cannot be written into the folder, or only by replacing existing ones."""
    fs, path = open_fs(folder)
    probe = join(path, f".{uuid.uuid4().hex}.tmp")
    # not write_atomic: its error would name a file that the user does not know
    with storage_errors(folder):
        if isinstance(fs, LocalFileSystem):
            with _local_file(probe, create=True):
                pass
        else:
            fs.pipe_file(probe, b"")
        fs.rm_file(probe)


def list_files(folder: str) -> list[str]:
    """URIs of the files directly in a folder, sorted, without hidden ones; empty if there is no folder. Links
    are followed. Manifests name the files of a run: list only files that no manifest names."""
    return _list(folder, "file")


def list_folders(folder: str) -> list[str]:
    """URIs of the folders directly in a folder, under the rules of list_files."""
    return _list(folder, "directory")


def copy_folder(source: str, target: str, exclude: Sequence[str] = ()) -> list[FileRef]:
    """Copy the files directly in a folder, each atomically and piece by piece; returns the copies. `exclude`
    takes name patterns like *.bin. Raises ValueError if there is nothing to copy."""
    uris = list_files(source)
    if not uris:
        raise ValueError(f"{source}: no files here")
    names = [uri.rsplit("/", 1)[-1] for uri in uris]
    return [
        _copy(join(source, name), join(target, name))
        for name in names
        if not any(fnmatchcase(name, pattern) for pattern in exclude)
    ]


def remove(uri: str) -> None:
    """Remove a file; a missing file is no error."""
    fs, path = open_fs(uri)
    with suppress(FileNotFoundError), storage_errors(uri):
        fs.rm_file(path)


def lies_in(uri: str, folder: str) -> bool:
    """Whether the file is in the folder without following a link out of it."""
    if not is_local(folder):
        return uri.startswith(folder.rstrip("/") + "/")
    return os.path.realpath(open_fs(uri)[1]).startswith(os.path.realpath(open_fs(folder)[1]) + "/")


def remove_folder(folder: str) -> None:
    """Remove a folder with its content; of a link, only the link. A missing folder is no error."""
    fs, path = open_fs(folder)
    with suppress(FileNotFoundError), storage_errors(folder):
        fs.rm(path, recursive=True)


def folder_bytes(folder: str) -> int:
    """Size of a file, or of all files in a folder and below, hidden ones included; 0 if there is none."""
    fs, path = open_fs(folder)
    with storage_errors(folder):
        # not du(): it queries each file again, and unfinished files may be gone by then
        return sum(entry["size"] for entry in fs.find(path, detail=True).values())


@contextmanager
def local_copy(uri: str) -> Iterator[str]:
    """Path of the file itself if it is local, else of a temporary copy. Raises FileNotFoundError."""
    fs, path = open_fs(uri)
    if isinstance(fs, LocalFileSystem):
        yield path
        return
    with scratch_folder() as folder:
        copy = os.path.join(folder, os.path.basename(path))
        with storage_errors(uri):
            fs.get_file(path, copy)
        yield copy


def local_folder(folder: str, exclude: Sequence[str] = ()) -> str:
    """Path of the folder if it is local, else of a copy of the files directly in it, which this process makes
    once and keeps. `exclude` as in copy_folder. Raises ValueError if the folder is empty."""
    if is_local(folder):
        return open_fs(folder)[1]
    # a run directory may have been removed and begun again: the listing, part of the key, tells them apart
    content = repr(sorted(_entries(folder, "file"), key=lambda entry: str(entry["name"])))
    return _copy_once(folder, tuple(exclude), hashlib.sha256(content.encode()).hexdigest()).name


@functools.lru_cache(maxsize=32)
def _copy_once(folder: str, exclude: tuple[str, ...], content: str) -> tempfile.TemporaryDirectory[str]:
    copy = scratch_folder()
    copy_folder(folder, copy.name, exclude)
    return copy


def list_unfinished(folder: str) -> list[str]:
    """Temporary files that killed processes have left in a folder and below. Object stores keep no such
    files."""
    fs, path = open_fs(folder)
    with storage_errors(folder):
        found = fs.find(path) if isinstance(fs, LocalFileSystem) else []
    return sorted(uri for uri in found if _UNFINISHED.fullmatch(os.path.basename(uri)))


def _copy(source: str, target: str) -> FileRef:
    with open_read(source) as read, writer(target) as written:
        shutil.copyfileobj(read, written, _PIECE_BYTES)
    return written.ref(target)


def _list(folder: str, kind: str) -> list[str]:
    names = (entry["name"].rstrip("/").rsplit("/", 1)[-1] for entry in _entries(folder, kind))
    return sorted(join(folder, name) for name in names if not name.startswith("."))


def _entries(folder: str, kind: str) -> list[dict[str, Any]]:
    """Entries of the storage for the files or folders directly in a folder."""
    fs, path = open_fs(folder)
    try:
        with storage_errors(folder):
            entries = fs.ls(path, detail=True)
    except FileNotFoundError:
        return []
    # fsspec gives every link on a local disk the type "other"
    if isinstance(fs, LocalFileSystem):
        is_kind = os.path.isfile if kind == "file" else os.path.isdir
        return [entry for entry in entries if is_kind(entry["name"])]
    return [entry for entry in entries if entry["type"] == kind]


@contextmanager
def _local_file(path: str, create: bool = False) -> Iterator[BinaryIO]:
    folder, name = os.path.split(path)
    try:
        os.makedirs(folder, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(f"{folder} is a file") from None
    # readers of Parquet folders skip both the dot and the ending
    temporary = os.path.join(folder, f".{name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _fence.get()()
        if create:
            name_new(temporary, path)
        else:
            os.replace(temporary, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
