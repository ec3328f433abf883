"""Consoles and streams of the command line, and how it reports errors."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any, NoReturn

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from sf_core.process.user_code import clean_logs, printable

WIDE = 500
"""Width of output into a pipe or a file, where a table would otherwise be cut to 80 columns."""


class PrintableConsole(Console):
    """Prints text of others, which cannot steer the terminal. Its own styles and cursor movements are no
    text."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))

    def render_str(self, text: str, **options: Any) -> Text:
        # before Text removes some of the characters silently
        return super().render_str(printable(text), **options)


def _make_console(*, stderr: bool = False, width: int | None = None) -> Console:
    # output has names and paths of the user: `[v2]` in them is no markup, `:x:` no emoji
    return PrintableConsole(stderr=stderr, markup=False, emoji=False, highlight=False, width=width)


UNREAD = 141
"""Exit code of a command whose output nobody reads any more, as of a program that SIGPIPE ends (128 + 13).
The signal itself would also end a command when a server closes a connection."""

# None: the caller has closed it
_is_terminal = sys.stdout is not None and sys.stdout.isatty()
console = _make_console(width=None if _is_terminal or "COLUMNS" in os.environ else WIDE)
errors = _make_console(stderr=True)


def tell(line: str) -> None:
    """Print a line, which is never broken at the terminal's width."""
    console.print(line, soft_wrap=True)


def print_json(data: object) -> None:
    """Print data as one JSON document, for programs."""
    print(json.dumps(data, indent=2))


@contextmanager
def nothing_else_printed(applies: bool = True) -> Iterator[None]:
    """If it applies: have what others print on standard output meanwhile appear on standard error, so that a
    document of ours stays alone there."""
    if not applies or sys.stdout is None:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        # for programs that the user's code starts
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@contextmanager
def report_bad_input() -> Iterator[None]:
    """For commands and parts of them, as a decorator too: bad input, a ValueError or an OSError, ends the
    command in one sentence."""
    try:
        yield
    except BrokenPipeError:  # the reader of the output has ended, as `head` does
        raise SystemExit(UNREAD) from None
    except (ValueError, OSError) as error:
        fail(str(error))


def fail(message: str) -> NoReturn:
    """Report bad input in one sentence and end the command."""
    say_error(message)
    raise typer.Exit(2)


def say_error(message: str) -> None:
    errors.print(Text.assemble(("error:", "red"), f" {printable(message)}"), soft_wrap=True)


def interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def hide_progress_bars() -> None:
    """Keep transformers from drawing bars between what is printed."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()


_RESULTS = 1
_ERRORS = 2
"""File descriptors."""

UNWRITTEN = 1
"""Exit code of a command whose output cannot be written, for example because a disk is full."""


class Output(io.TextIOWrapper):
    """A standard stream. The first write of results that fails ends the command. What the command writes
    while it ends is thrown away. Errors and log lines that cannot be written are thrown away too: a server
    outlives the reader of its log."""

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
        if self.fileno() == _ERRORS:
            return
        if isinstance(error, BrokenPipeError):
            self.code = UNREAD
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
        Output.of(stream, number) for number, stream in ((_RESULTS, sys.stdout), (_ERRORS, sys.stderr))
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
