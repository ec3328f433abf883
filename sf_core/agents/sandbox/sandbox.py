"""A sandbox as its users see it: files in, commands, files out."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, cast, get_args

from sf_core.agents.command_output import CommandOutput, Ear
from sf_core.agents.folders import TooManyFilesError, files_below, is_name_below
from sf_core.agents.sandbox import bubblewrap, podman, porter
from sf_core.agents.sandbox.forward import forward
from sf_core.agents.sandbox.process import SandboxError, SandboxProcess, seal, why_no_sandbox
from sf_core.config.programs import SandboxLimits
from sf_core.types import Endpoint

log = logging.getLogger(__name__)

KILL_S = 5.0
"""Seconds in which a command that is told to end has ended; else its sandbox is."""

WRITE_S = 60.0

MAX_FILES_BYTES = 2**26
"""Most bytes of the files that are read out."""

EndedBy = Literal["exit", "time", "output", "memory"]


@dataclass(frozen=True, slots=True)
class Ended:
    """The result of a command in a sandbox."""

    status: int
    """The exit status of the command. If a signal killed the command: the negative number of the signal."""
    ended_by: EndedBy
    """`exit`: the command ended by itself, or reached its limit on CPU time or file size. `time`, `output` or
    `memory`: the sandbox killed the command because the command reached this limit."""
    output: str
    """Standard output and standard error together. A long output is shortened to its beginning and its
    end."""


@asynccontextmanager
async def open_sandbox(
    limits: SandboxLimits,
    files: Mapping[str, bytes] | None = None,
    endpoint: Endpoint | None = None,
    programs: Iterable[str] = (),
) -> AsyncIterator[Sandbox]:
    """Open a sandbox for programs that you do not trust, for example code that a model wrote.

    `limits` limits memory, time and files. `files` maps names to contents: these files are written to the
    work folder. Programs in the sandbox can reach only the address of `endpoint`. Without an endpoint, the
    programs have no network. `programs` are additional files of the host that programs in the sandbox can
    read. When the `async with` block ends, all processes and files of the sandbox are removed. Raises
    SandboxError if this host cannot make a sandbox.

    ```python
    async with open_sandbox(SandboxLimits(memory_mb=256), {"a.py": b"print(6*7)"}) as box:
        ended = await box.run(["python3", "a.py"], timeout_s=5)
        assert (ended.status, ended.output) == (0, "42\\n")
    ```
    """
    if reason := await asyncio.to_thread(why_no_sandbox, limits.image):
        raise SandboxError(reason)
    process = SandboxProcess(limits, programs)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(process.end)
        listener = await process.begin()
        if endpoint is None:
            listener.close()
        else:
            endpoint = await stack.enter_async_context(forward(endpoint, listener))
        box = Sandbox(process, limits, endpoint)
        if files:
            await box.write(files)
        yield box


class Sandbox:
    """An open sandbox. Call `open_sandbox` to get a `Sandbox`."""

    def __init__(self, process: SandboxProcess, limits: SandboxLimits, endpoint: Endpoint | None) -> None:
        self._process = process
        self._limits = limits
        self.endpoint = endpoint
        """The endpoint, with the address that programs in the sandbox must use. None if the programs have no
        network."""
        self.limits_by: Literal["cgroup", "rlimits"] = "rlimits"
        """`cgroup`: the kernel limits the memory of all processes together. `rlimits`: the kernel limits the
        memory of each process, and the sandbox checks the sum over all processes."""
        if process.group is not None or limits.image is not None:
            self.limits_by = "cgroup"
        _log_limits(self.limits_by)
        self._turn = asyncio.Lock()

    @property
    def folder(self) -> int:
        """A file descriptor of the work folder. Do not trust the files in it."""
        return self._process.folder

    async def run(
        self,
        words: Sequence[str],
        *,
        stdin: str | bytes = "",
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        written: CommandOutput | None = None,
    ) -> Ended:
        """Run a command in the work folder and wait until the command ends. All processes that the command
        started are then ended, too.

        `words` is the program and its arguments, without a shell. `timeout_s` is the time limit in seconds.
        `env` contains additional environment variables. `written` receives standard output and standard error
        separately. Concurrent calls run one after the other. If a call is cancelled, the sandbox ends. Raises
        SandboxError if the command cannot be started or the sandbox has ended."""
        return await self._run("run", words, stdin, timeout_s, env, written)

    async def run_python(self, source: str, *, stdin: str | bytes = "", timeout_s: float) -> Ended:
        """Run Python source code and wait until the code ends. The code can import only the standard library.
        This method is faster than starting a new Python process with `run`."""
        return await self._run("interpret", [source], stdin, timeout_s)

    async def _run(
        self,
        how: Literal["run", "interpret"],
        words: Sequence[str],
        stdin: str | bytes,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        written: CommandOutput | None = None,
    ) -> Ended:
        async with self._turn:
            command = _Command(self._process, self._limits, written)
            try:
                status, ended_by = await command.run(how, words, _as_bytes(stdin), dict(env or {}), timeout_s)
            except asyncio.CancelledError:
                # nobody would hear its answer
                self._process.kill()
                raise
            finally:
                command.close()
            return Ended(status, ended_by, command.written.all.text())

    async def write(self, files: Mapping[str, bytes]) -> None:
        """Write files to the work folder. Each key is the name of a file. Existing files and links with these
        names are replaced. A file that begins with `#!` becomes executable. Raises ValueError if a name leads
        out of the work folder."""
        parts = list[bytes]()
        for name, content in files.items():
            if not is_name_below(name):
                raise ValueError(f"expected the name of a file in the work folder, got {name!r:.100}")
            parts += [f"{len(content)} {os.fsencode(name).hex()}\n".encode(), content]
        async with self._turn:
            await self._process.ask("write", [seal(b"".join(parts))], WRITE_S)

    async def files(self) -> dict[str, bytes]:
        """Read all files of the work folder, except links, pipes and devices. Each key of the result is the
        name of a file. Raises SandboxError if the folder has too many files, or more than 64 MiB in all."""
        return await asyncio.to_thread(_files, self.folder)


@cache
def _log_limits(limits_by: str) -> None:
    log.info("memory and processes in sandboxes are limited by %s", limits_by)


class _Command:
    """One command in a sandbox."""

    def __init__(self, process: SandboxProcess, limits: SandboxLimits, written: CommandOutput | None) -> None:
        self._process = process
        self._limits = limits
        self._left = limits.output_mb * 2**20
        self.written = written or CommandOutput()
        takers = [self.written.on_output] if written is None else [written.on_output, written.on_error]
        self._ears = [Ear(partial(self._hear, on_data)) for on_data in takers]
        self._ended_by: EndedBy | None = None
        self._timers: list[asyncio.TimerHandle] = []

    async def run(
        self, how: str, words: Sequence[str], stdin: bytes, env: dict[str, str], timeout_s: float
    ) -> tuple[int, EndedBy]:
        settings = [
            f"{name}={value}"
            for name, value in ((podman if self._limits.image else bubblewrap).variables() | env).items()
        ]
        facts = b"".join(os.fsencode(word) + b"\0" for word in (str(len(words)), *words, *settings))
        files = [seal(facts), seal(stdin), *[await _pipe_to(ear) for ear in self._ears]]
        if len(self._ears) == 1:
            files.append(os.dup(files[-1]))
        self._after(timeout_s, self._stop, "time")
        group = self._process.group
        num_killed = group.num_killed() if group else 0
        try:
            status, ended_by = _parse_end(await self._process.ask(how, files))
        except SandboxError:
            if self._ended_by is None:
                raise
            return -signal.SIGKILL, self._ended_by
        for ear in self._ears:
            await ear.has_ended.wait()
        if group and group.num_killed() > num_killed:
            ended_by = "memory"
        return status, self._ended_by or ended_by

    def close(self) -> None:
        for timer in self._timers:
            timer.cancel()
        for ear in self._ears:
            ear.close()

    def _hear(self, on_data: Callable[[bytes], None], data: bytes) -> None:
        self._left -= len(data)
        if self._left < 0:
            self._stop("output")
        else:
            on_data(data)

    def _stop(self, reason: EndedBy) -> None:
        if self._ended_by is None:
            self._ended_by = reason
            # one that has ended meanwhile has ended the command too
            with suppress(SandboxError):
                self._process.send("kill")
            self._after(KILL_S, self._process.kill)

    def _after(self, delay_s: float, function: Callable[..., None], *args: Any) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(delay_s, function, *args))


async def _pipe_to(ear: Ear) -> int:
    """The end to write into."""
    reading, writing = os.pipe()
    if os.getuid() == 0:
        # or programs could not open /dev/stderr
        os.fchown(writing, porter.NOBODY, porter.NOBODY)
    pipe = open(reading, "rb", 0)  # noqa: SIM115, the ear closes it
    await asyncio.get_running_loop().connect_read_pipe(lambda: ear, pipe)
    return writing


def _parse_end(report: str) -> tuple[int, EndedBy]:
    try:
        word, status, ended_by = report.split()
        if word == "ended" and ended_by in get_args(EndedBy):
            return int(status), cast(EndedBy, ended_by)
    except ValueError:
        pass
    raise SandboxError(f"the sandbox sent an invalid answer: {report!r:.100}")


def _files(folder: int) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    left = MAX_FILES_BYTES
    try:
        for name, file in files_below(folder):
            files[name] = file.read(left + 1)
            left -= len(files[name])
            if left < 0:
                raise SandboxError(f"the files in the sandbox are over the limit of {MAX_FILES_BYTES} bytes")
    except TooManyFilesError as error:
        raise SandboxError(f"the work folder of the sandbox has {error}") from None
    return files


def _as_bytes(text: str | bytes) -> bytes:
    return text.encode(errors="backslashreplace") if isinstance(text, str) else text
