"""Whole files on any fsspec filesystem, each written at once or not at all.

Owns atomic writes, checksums and URIs. Knows nothing of what the files mean.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase

import fsspec
from fsspec.implementations.local import LocalFileSystem


@dataclass(frozen=True, slots=True)
class FileRef:
    """A file that was written, and what it must look like when it is read."""

    uri: str
    """Where it lies; manifests keep it relative to their run directory."""
    bytes: int
    sha256: str


def open_fs(uri: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The filesystem of a URI or local path, and the path on it."""
    # other processes write the same folders: a cached listing would hide their files
    fs, path = fsspec.core.url_to_fs(uri, use_listings_cache=False)
    return fs, path


def is_local(uri: str) -> bool:
    return isinstance(open_fs(uri)[0], LocalFileSystem)


def absolute(uri: str) -> str:
    """A plain absolute path for local files, so that it means the same in every process; else the URI."""
    fs, path = open_fs(uri)
    return path if isinstance(fs, LocalFileSystem) else uri.rstrip("/")


def join(base: str, *parts: str) -> str:
    return "/".join([base.rstrip("/"), *parts])


def exists(uri: str) -> bool:
    fs, path = open_fs(uri)
    return bool(fs.exists(path))


def read_bytes(uri: str) -> bytes:
    """Raises FileNotFoundError."""
    fs, path = open_fs(uri)
    return bytes(fs.cat_file(path))


def write_atomic(uri: str, data: bytes, *, create: bool = False) -> FileRef:
    """Write the whole file or nothing. With `create` an existing file is kept and FileExistsError raised,
    also when two processes write at the same moment."""
    fs, path = open_fs(uri)
    if isinstance(fs, LocalFileSystem):
        _write_local(path, data, create)
    else:
        fs.pipe_file(path, data, mode="create" if create else "overwrite")
    return FileRef(uri, len(data), hashlib.sha256(data).hexdigest())


def list_files(folder: str) -> list[str]:
    """URIs of the files directly in a folder, sorted, without hidden ones; empty if there is no folder.
    Manifests name the files of a run: list only what no manifest names."""
    return _list(folder, "file")


def list_folders(folder: str) -> list[str]:
    """URIs of the folders directly in a folder, likewise."""
    return _list(folder, "directory")


def copy_folder(source: str, target: str, exclude: Sequence[str] = ()) -> None:
    """Copy the files directly in a folder, each atomically; `exclude` takes name patterns like *.bin.
    Raises ValueError if there is nothing to copy."""
    uris = list_files(source)
    if not uris:
        raise ValueError(f"{source}: no files here")
    for uri in uris:
        name = uri.rsplit("/", 1)[-1]
        if not any(fnmatchcase(name, pattern) for pattern in exclude):
            write_atomic(join(target, name), read_bytes(uri))


def remove(uri: str) -> None:
    """Remove a file; one that is gone already is no error."""
    fs, path = open_fs(uri)
    try:
        fs.rm_file(path)
    except FileNotFoundError:
        return


@contextmanager
def local_copy(uri: str) -> Iterator[str]:
    """The file as a local path: itself, or a temporary copy. Raises FileNotFoundError."""
    fs, path = open_fs(uri)
    if isinstance(fs, LocalFileSystem):
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = os.path.join(folder, os.path.basename(path))
        fs.get_file(path, copy)
        yield copy


def _list(folder: str, kind: str) -> list[str]:
    fs, path = open_fs(folder)
    try:
        entries = fs.ls(path, detail=True)
    except FileNotFoundError:
        return []
    names = (entry["name"].rstrip("/").rsplit("/", 1)[-1] for entry in entries if entry["type"] == kind)
    return sorted(join(folder, name) for name in names if not name.startswith("."))


def _write_local(path: str, data: bytes, create: bool) -> None:
    folder, name = os.path.split(path)
    os.makedirs(folder, exist_ok=True)
    # neither the dot nor the ending is what readers of Parquet folders look for
    temporary = os.path.join(folder, f".{name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if create:
            os.link(temporary, path)
        else:
            os.replace(temporary, path)
            return
    except BaseException:
        _unlink(temporary)
        raise
    _unlink(temporary)


def _unlink(path: str) -> None:
    if os.path.exists(path):
        os.unlink(path)
