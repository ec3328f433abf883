"""What a command leaves: what it has written, and its answer. Each of them is bounded."""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import Callable

from sf_core.agents.folders import LeadsOutError, TooManyFilesError, file_in, files_below

MAX_ANSWER = 2**20
"""Most bytes of an answer; of a folder, of all names and files together."""

MAX_OUTPUT = 2**16
"""Most bytes that are kept of what a command has written, half of them its beginning and half its end."""

LAST_LINES = 5
MAX_LAST = 1000
"""Lines and characters of standard error that the sentence on a failure quotes."""


class NoAnswerError(Exception):
    """Why there is no answer, as one sentence without its subject."""


class Transcript:
    """The beginning and the end of a stream of bytes."""

    def __init__(self, most: int = MAX_OUTPUT) -> None:
        self._half = most // 2
        self._first = bytearray()
        self._last = bytearray()
        self._num_bytes = 0

    def add(self, data: bytes) -> None:
        self._num_bytes += len(data)
        room = self._half - len(self._first)
        self._first += data[:room]
        self._last += data[room:]
        # not at once, because that would copy all of it for every line
        if len(self._last) > 2 * self._half:
            del self._last[: -self._half]

    def text(self) -> str:
        last = self._last[-self._half :]
        num_left_out = self._num_bytes - len(self._first) - len(last)
        if not num_left_out:
            # a character may begin in the first part and end in the last
            return (self._first + last).decode(errors="replace")
        beginning = self._first.decode(errors="replace")
        end = last.decode(errors="replace")
        return f"{beginning}\n... {num_left_out} bytes left out ...\n{end}"


class CommandOutput:
    """What a command writes."""

    def __init__(self) -> None:
        self.all = Transcript()
        self._answer = bytearray()
        self._errors = Transcript(2 * MAX_LAST)

    def on_output(self, data: bytes) -> None:
        self.all.add(data)
        # one more than an answer may have
        self._answer += data[: MAX_ANSWER + 1 - len(self._answer)]

    def on_error(self, data: bytes) -> None:
        self.all.add(data)
        self._errors.add(data)

    def answer(self) -> str:
        return text_of(bytes(self._answer), "the printed text")

    def last_lines(self) -> str:
        """The end of what it wrote on standard error."""
        return "\n".join(self._errors.text().strip().splitlines()[-LAST_LINES:])[-MAX_LAST:]


class Ear(asyncio.Protocol):
    """Reads a pipe."""

    def __init__(self, on_data: Callable[[bytes], None]) -> None:
        self._on_data = on_data
        self._transport: asyncio.BaseTransport | None = None
        self.has_ended = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._on_data(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.has_ended.set()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def text_of(answer: bytes, subject: str) -> str:
    """Raises NoAnswerError if it is too large or no UTF-8."""
    if len(answer) > MAX_ANSWER:
        raise NoAnswerError(f"{subject} is larger than the limit of {MAX_ANSWER} bytes")
    try:
        return answer.decode()
    except UnicodeDecodeError as error:
        raise NoAnswerError(f"{subject} is not valid UTF-8: {error.reason} at byte {error.start}") from None


def answer_in(folder: int, name: str) -> str:
    """Text of a file in an open folder. Raises NoAnswerError if there is none, or it leads out."""
    try:
        file = file_in(folder, name)
    except LeadsOutError as error:
        raise NoAnswerError(str(error)) from None
    if file is None:
        raise NoAnswerError(f"the file {name} does not exist in the command's folder")
    with file:
        return text_of(file.read(MAX_ANSWER + 1), name)


def files_in(folder: int, except_for: dict[str, bytes]) -> dict[str, str | dict[str, str]]:
    """Texts of the files below an open folder by their names, without those that are as given; a file that is
    no UTF-8 is {"base64": ...}. Raises NoAnswerError if they are too large."""
    files: dict[str, str | dict[str, str]] = {}
    left = MAX_ANSWER
    try:
        for name, file in files_below(folder):
            content = file.read(left + 1)
            if except_for.get(name) == content:
                continue
            left -= len(os.fsencode(name)) + len(content)
            if left < 0:
                raise NoAnswerError(f"the command's folder is over the limit of {MAX_ANSWER} bytes")
            printable = os.fsencode(name).decode(errors="replace")
            try:
                files[printable] = content.decode()
            except UnicodeDecodeError:
                files[printable] = {"base64": base64.b64encode(content).decode()}
    except TooManyFilesError as error:
        raise NoAnswerError(f"the command's folder has {error}") from None
    return files
