"""The file of a journal: reading, appending and rewriting it, by the process that owns it; and the form of
its records.

Owns that no data of another process is truncated or replaced. The file must be the file that this process
left, with the length that it left, except for the beginning of a failed write of its own.

Where locks have no effect, an earlier owner may still append. A process therefore writes only to a file that
it made: before its first write it copies the records that it has read, so an earlier owner finds another file
at the path.

The file is a sequence of frames: length, CRC-32, and a record. A record is an event as MessagePack: its tag,
then its fields in order. Token ids and log-probs are the bytes of their arrays. Keys are in plain text: no
other user may read a journal.
"""

from __future__ import annotations

import logging
import os
import secrets
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar, get_args, get_origin

import msgspec
import numpy as np
from pydantic import BaseModel, SecretStr, ValidationError

from sf_core.dataplane.journal.ownership import NotOwnedError, Owner, Ownership
from storage.json_files import first_fault
from storage.local import open_own

_HEADER = struct.Struct("<II")


def frame(event: Event) -> bytes:
    return frame_payload(encode(event))


def frame_payload(payload: bytes) -> bytes:
    return _HEADER.pack(len(payload), zlib.crc32(payload)) + payload


def frames(file: BinaryIO) -> Iterator[bytes]:
    """Frames of a file, up to the first broken one."""
    while len(header := file.read(_HEADER.size)) == _HEADER.size:
        length, checksum = _HEADER.unpack(header)
        num_left = os.fstat(file.fileno()).st_size - file.tell()
        # a file system leaves zeros where nothing was written
        if not 0 < length <= num_left:
            return
        payload = file.read(length)
        if zlib.crc32(payload) != checksum:
            return
        yield header + payload


def payload(frame: bytes) -> bytes:
    return frame[_HEADER.size :]


class Event(msgspec.Struct, array_like=True):
    """An event of a run, with all facts that are needed to repeat its effect.

    Each kind names the tag that journals hold, so that a class may be renamed.
    """


def make_decoder(kind: Any) -> Callable[[bytes], Any]:
    """A function that decodes a value of this type, or union of types. It raises ValueError for other
    values."""
    return msgspec.msgpack.Decoder(kind, dec_hook=_decode_field).decode


def _decode_field(kind: Any, data: Any) -> Any:
    # compared by origin: an alias of numpy 2.5 on Python 3.12 does not equal the type that msgspec passes
    if get_origin(kind) is np.ndarray:
        _shape, dtype = get_args(kind)
        return np.frombuffer(data, *get_args(dtype))
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise ValueError(first_fault(error)) from None


def _encode_field(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, BaseModel):
        return value.model_dump()
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    raise TypeError(f"{value!r} cannot be recorded")


encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder(enc_hook=_encode_field).encode


log = logging.getLogger(__name__)

E = TypeVar("E")

PIECE_BYTES = 4 * 2**20
"""Bytes in memory at a time while a journal is read."""


class _FileIdentity(NamedTuple):
    """Identifies the file at a path. A rename onto the path changes it."""

    device: int
    inode: int

    @classmethod
    def from_stat(cls, stat: os.stat_result) -> _FileIdentity:
        return cls(stat.st_dev, stat.st_ino)


class JournalFile:
    """Methods raise NotOwnedError if the journal is another process's."""

    def __init__(self, path: Path, owner: Owner) -> None:
        self.path = path
        self.ownership = Ownership(path, owner)
        self.end = 0
        """Number of bytes of the file that are valid."""
        self.synced_end = 0
        """Number of bytes of the file that are on disk."""
        self._expected_end = 0
        """Where the last write of this process would have ended: bytes between `end` and this are a torn
        write."""
        self._identity: _FileIdentity | None = None
        """Identity of the file that this process left. None: this process found no file."""
        self._is_known = False
        """Whether `end` and `_identity` describe the file that this process left, or has read."""
        self._is_made = False
        """Whether this process made the file."""
        self._file: FileIO | None = None

    def acquire(self) -> None:
        """Own the file, until `release` or `close`."""
        if self.ownership.is_held:
            return
        self.ownership.acquire()
        try:
            if self._is_known:
                self._check_unchanged()
        except BaseException:
            self.ownership.release()
            raise

    def read(self, decode: Callable[[bytes], E]) -> Iterator[list[E]]:
        """All intact records, piece by piece. The file is truncated at a broken record, whose write was
        torn."""
        if not self.path.exists() and not self._is_known:
            # there is nothing to own so far, and a run that is refused must leave no files
            self._remember(None, 0)
        if self._is_known and self._identity is None:
            return
        self.acquire()
        if self._is_known:
            self._check_unchanged()
        with open(self.path, "r+b", opener=private) as file:
            piece: list[E] = []
            piece_start = 0
            end = 0
            for data in self._known_frames(file):
                piece.append(decode(payload(data)))
                end += len(data)
                if end >= piece_start + PIECE_BYTES:
                    yield piece
                    piece = []
                    piece_start = end
            self._finish_reading(file, end)
        if piece:
            yield piece

    def _known_frames(self, file: BinaryIO) -> Iterator[bytes]:
        """Intact frames, without those that an earlier owner appended after this process read the file."""
        end = 0
        for data in frames(file):
            end += len(data)
            if self._is_known and not self._is_ours and end > self.end:
                return
            yield data

    def _finish_reading(self, file: BinaryIO, intact: int) -> None:
        """Truncate the file after its `intact` bytes, if no other process writes to it."""
        stat = os.fstat(file.fileno())
        if self._is_ours:
            if self._is_known:
                self._check_size(stat.st_size)
            if excess := stat.st_size - intact:
                log.warning("%s: removed %d bytes of an incomplete or corrupt end", self.path, excess)
                file.truncate(intact)
                self._close()
                self._remember(stat, intact)
        if not self._is_known:
            self._remember(stat, intact)

    @property
    def _is_ours(self) -> bool:
        """Whether no other process writes to the file."""
        return self.ownership.is_enforced or self._is_made

    def append(self, data: bytes) -> None:
        if self._file is None:
            self._open()
        assert self._file is not None
        size = self._file.seek(0, os.SEEK_END)
        self._check_size(size)
        if size != self.end:
            # a torn frame in the middle would hide all later frames
            self._file.truncate(self.end)
        self._expected_end = self.end + len(data)
        remaining = memoryview(data)
        while remaining:
            remaining = remaining[self._file.write(remaining) :]
        self.end = self._expected_end

    def sync(self) -> None:
        # closed by a rewrite, which has forced the file to disk
        if self._file is not None:
            os.fdatasync(self._file.fileno())
            # after the write: a process that replaces the file from now on has read all acknowledged records
            self._check_not_replaced()

    def rewrite(self, head: Iterable[bytes], keep: Callable[[bytes], bool]) -> None:
        """Replace the content with `head`, followed by the old frames for whose payload `keep` is true."""
        if self._file is None:
            self._open()
        self._check_unchanged()
        with open(self.path, "rb", opener=private) as before:
            self._replace(before, head, (data for data in frames(before) if keep(payload(data))))

    def resume(self) -> None:
        """Own the file again, if it is unchanged."""
        self.acquire()
        if self._is_known:
            self._check_unchanged()

    def release(self) -> None:
        """Let other processes own the file until this one appends, reads or rewrites again."""
        self._close()
        self.ownership.release()

    def _open(self) -> None:
        self.acquire()
        if not self._is_ours and self.path.exists():
            self._copy()
        self._file = open(self.path, "ab", 0, opener=private)  # noqa: SIM115 it stays open between writes
        stat = os.fstat(self._file.fileno())
        if not self._is_known or (self._identity is None and stat.st_size == 0):
            self._remember(stat, stat.st_size)
            self._is_made = True
            self._sync_folder()

    def _copy(self) -> None:
        """Replace the file by a new one with the records that this process has read."""
        with open(self.path, "rb", opener=private) as before:
            self._check_identity(os.fstat(before.fileno()))
            self._replace(before, (), self._known_frames(before))

    def _replace(self, before: BinaryIO, head: Iterable[bytes], retained_frames: Iterable[bytes]) -> None:
        # where locks have no effect, another process may make a temporary file at the same time
        temporary = self.path.with_suffix(f".{secrets.token_hex(8)}.tmp")
        try:
            with open(temporary, "wb", opener=private) as file:
                file.writelines(head)
                file.writelines(retained_frames)
                file.flush()
                os.fsync(file.fileno())
                stat = os.fstat(file.fileno())
            if not os.path.samestat(os.stat(self.path), os.fstat(before.fileno())):
                raise self._changed_error()
            os.replace(temporary, self.path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        self._close()
        self._remember(stat, stat.st_size)
        self._is_made = True
        self._sync_folder()

    def _remember(self, stat: os.stat_result | None, end: int) -> None:
        """Remember this file, up to `end`, as the file that this process left."""
        self._identity = None if stat is None else _FileIdentity.from_stat(stat)
        self.end = end
        self.synced_end = end
        self._expected_end = end
        self._is_known = True

    def _check_unchanged(self) -> None:
        """Raises NotOwnedError unless the file at the path is as this process left it."""
        stat = self._check_not_replaced()
        if stat is not None and self._is_ours:
            self._check_size(stat.st_size)

    def _check_not_replaced(self) -> os.stat_result | None:
        """Raises NotOwnedError unless the file at the path is the file that this process left. None: there is
        still no file."""
        try:
            stat = os.stat(self.path)
        except FileNotFoundError:
            if self._identity is None:
                return None
            raise self._changed_error() from None
        self._check_identity(stat)
        return stat

    def _check_identity(self, stat: os.stat_result) -> None:
        if self._is_known and _FileIdentity.from_stat(stat) != self._identity:
            raise self._changed_error()

    def _check_size(self, size: int) -> None:
        if not self.end <= size <= self._expected_end:
            raise self._changed_error()

    def _changed_error(self) -> NotOwnedError:
        return NotOwnedError(
            f"another process changed, moved or removed {self.path} while this data plane had the run "
            "open, so this data plane records nothing more of the run: start the flow of the run again to "
            "continue from that file",
            "journal_changed",
        )

    def _sync_folder(self) -> None:
        """Force the name of the file to disk."""
        # not every file system supports this
        with suppress(OSError):
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def private(path: str, flags: int) -> int:
    """Opener of files that no other user may read, because they hold keys of runs and private data of
    agents."""
    return open_own(path, flags, 0o600)
