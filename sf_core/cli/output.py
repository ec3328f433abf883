"""The streams of a command: what happens if nobody reads its output, or if it cannot be written."""

from __future__ import annotations

import io
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from sf_core.cli.terminal import UNREAD, errors, say_error
from sf_core.printable import clean_logs

UNWRITTEN = 1
"""Exit code of a command whose output cannot be written, for example because a disk is full."""


class Output(io.TextIOWrapper):
    """A standard stream. The first write that fails ends the command. What the command writes while it ends
    is thrown away."""

    code: int | None = None
    """Exit code of the command after a write has failed."""

    @classmethod
    def of(cls, stream: Any, number: int) -> Output:
        """A stream that writes to this file descriptor like `stream` does, Python's own for it: None if the
        caller has closed it. A character that its encoding does not have is escaped."""
        return cls(
            io.BufferedWriter(io.FileIO(number, "w", closefd=False)),
            encoding=getattr(stream, "encoding", "utf-8"),
            errors="backslashreplace",
            line_buffering=getattr(stream, "line_buffering", False),
            write_through=getattr(stream, "write_through", False),
        )

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self._give_up(error)
        return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        if isinstance(error, BrokenPipeError):
            self.code = UNREAD
        elif self is sys.stderr:
            # there is no place left to say so, and the results of the command are not there
            return
        else:
            self.code = UNWRITTEN
            say_error(f"the output of the command cannot be written: {error.strerror}")
        raise SystemExit(self.code)


@contextmanager
def command_streams() -> Iterator[None]:
    """Give a command its standard streams. Its end is quiet if nobody reads the output, and one sentence if
    the output cannot be written. Without a stream (`>&-`) the output is thrown away. What a defect of ours
    prints is made printable, too."""
    clean_logs()
    _open_missing()
    sys.stdout, sys.stderr = streams = [
        Output.of(stream, number) for number, stream in ((1, sys.stdout), (2, sys.stderr))
    ]
    threading.excepthook = lambda failed: _tell_crash(failed.exc_value)
    try:
        yield
    except Exception as error:
        _tell_crash(error)
        raise SystemExit(1) from None
    finally:
        for stream in streams:
            with suppress(SystemExit):
                stream.flush()
        # a thread may have met it, which ends only itself
        if code := next(filter(None, (stream.code for stream in streams)), None):
            raise SystemExit(code)


def _open_missing() -> None:
    """Open standard streams that the caller has closed. A file that is opened later would get the number of
    the stream, and whatever a child process prints would be written into it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)


def _tell_crash(error: BaseException | None) -> None:
    if error is not None and not isinstance(error, SystemExit):
        errors.print("".join(traceback.format_exception(error)), end="", soft_wrap=True)
