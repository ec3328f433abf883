"""The processes of a sandbox, as its worker sees them: bubblewrap, and the porter at the end of a channel.

The porter is ours, but it lives among what models write: what it says is bounded and looked at, and its open
files are taken once, before anything of theirs runs.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from functools import cache

from sf_core.agents.sandbox import bubblewrap, podman
from sf_core.agents.sandbox.cgroups import ControlGroup, parent_group
from sf_core.agents.sandbox.porter import receive
from sf_core.config.programs import SandboxLimits
from sf_core.process.environment_variables import select_inherited

log = logging.getLogger(__name__)

START_S = 60.0
"""Longest time for a sandbox to begin."""

END_S = 10.0
"""Longest time for a sandbox to end by itself."""

MAX_ANSWER = 4096
"""Most bytes of an answer of the porter."""


class SandboxError(Exception):
    """A sandbox cannot be made, or has failed. The message is one sentence with the reason."""


@cache
def why_no_sandbox(image: str | None = None) -> str | None:
    """Check whether this host can make sandboxes. Returns None if the host can. If the host cannot,
    returns one sentence with the reason.

    `image` is an OCI image for podman. None means the system of the host. The first call makes a sandbox to
    check, and takes up to one minute. Later calls return the result of the first call."""
    if sys.platform != "linux":
        return "sandboxes work only on Linux"
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.close()
    try:
        with _start(SandboxLimits(image=image), theirs, (), None) as process:
            _, errors = process.communicate(timeout=START_S)
    except FileNotFoundError as error:
        return str(error)
    except subprocess.TimeoutExpired:
        process.kill()
        return f"creating a sandbox took longer than {START_S:g} s"
    if process.returncode == 0:
        return None
    if image is not None:
        return (
            f"a sandbox of the image {image} cannot be created here ({_last_line(errors)}): run "
            "`podman pull` for this image first, and check that `podman run` can run its python3"
        )
    return (
        f"a sandbox cannot be created here ({_last_line(errors)}): this user must be allowed to create user "
        "namespaces, by `sysctl user.max_user_namespaces`, by AppArmor, and by the container if this host "
        "is a container"
    )


class SandboxProcess:
    """A sandbox under way."""

    def __init__(self, limits: SandboxLimits, programs: Iterable[str]) -> None:
        parent = parent_group()
        # podman makes groups itself
        self.group = ControlGroup(parent, limits) if parent and limits.image is None else None
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setblocking(False)
        try:
            self._process = _start(limits, theirs, programs, self.group)
        except OSError as error:
            self._channel.close()
            if self.group is not None:
                self.group.remove()
            raise SandboxError(f"a sandbox cannot be started: {error}") from None
        self.folder = -1
        """Its work folder, open."""
        self._first = -1
        """Its first process, as an open file."""

    async def begin(self) -> socket.socket:
        """Returns a listening socket of its network."""
        message, files = await self._read_answer(START_S, max_files=3)
        if message != "ready" or len(files) != 3:
            _close(files)
            raise SandboxError(f"the first message of the sandbox cannot be understood: {message!r:.100}")
        self.folder, listener, self._first = files
        return socket.socket(fileno=listener)

    async def ask(self, word: str, files: Sequence[int], timeout_s: float | None = None) -> str:
        """Have the porter do something with these files, which are closed here; returns what it answers."""
        self.send(word, files)
        message, _ = await self._read_answer(timeout_s, max_files=0)
        if message.startswith("error "):
            raise SandboxError(f"error in the sandbox: {message.removeprefix('error ')}")
        return message

    def send(self, word: str, files: Sequence[int] = ()) -> None:
        try:
            socket.send_fds(self._channel, [word.encode()], files)
        except OSError:
            raise self._over() from None
        finally:
            _close(files)

    def kill(self) -> None:
        """End all that is inside, whatever the porter does."""
        with suppress(OSError):
            if self._first >= 0:
                signal.pidfd_send_signal(self._first, signal.SIGKILL)
            else:
                os.killpg(self._process.pid, signal.SIGKILL)

    async def end(self) -> None:
        """Return when nothing of the sandbox is left."""
        self._channel.close()
        if self.folder >= 0:
            os.close(self.folder)
            self.folder = -1
        try:
            if not await self._has_ended():
                self.kill()
                if not await self._has_ended():
                    log.warning("processes of an ended sandbox still run after %g s", 2 * END_S)
        finally:
            self._process.poll()
            assert self._process.stderr is not None
            self._process.stderr.close()
            if self._first >= 0:
                os.close(self._first)
                self._first = -1
            if self.group is not None:
                self.group.remove()

    async def _has_ended(self) -> bool:
        # bubblewrap ends after the first process, and that after all others
        number = os.pidfd_open(self._process.pid)
        try:
            async with asyncio.timeout(END_S):
                await _readable(number)
        except TimeoutError:
            return False
        finally:
            os.close(number)
        return True

    async def _read_answer(self, timeout_s: float | None, max_files: int) -> tuple[str, list[int]]:
        try:
            async with asyncio.timeout(timeout_s):
                await _readable(self._channel.fileno())
        except TimeoutError:
            raise SandboxError(f"the sandbox did not answer for {timeout_s:g} s") from None
        try:
            message, files = receive(self._channel, MAX_ANSWER, max_files)
        except OSError:
            raise self._over() from None
        if not message:
            raise self._over()
        return message.decode(errors="replace"), files

    def _over(self) -> SandboxError:
        assert self._process.stderr is not None
        os.set_blocking(self._process.stderr.fileno(), False)
        with suppress(OSError, ValueError):
            if last_line := _last_line(self._process.stderr.read() or b""):
                return SandboxError(f"the sandbox has ended: {last_line}")
        return SandboxError("the sandbox has ended")


def _start(
    limits: SandboxLimits, theirs: socket.socket, programs: Iterable[str], group: ControlGroup | None
) -> subprocess.Popen[bytes]:
    maker = bubblewrap if limits.image is None else podman
    facts = {
        "memory": limits.memory_mb * 2**20,
        "disk": limits.disk_mb * 2**20,
        "processes": limits.processes,
        "files": limits.open_files,
        "cpu": limits.cpu_s,
    }
    words = [maker.python(), "-I", "-S", bubblewrap.PORTER, str(maker.CHANNEL)]
    words += [f"{name}={value}" for name, value in facts.items()]
    with closing(theirs):
        command = maker.command_line(limits, words, programs)
        return subprocess.Popen(
            command if group is None else group.join(command),
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=select_inherited(),
            start_new_session=True,
        )


def seal(content: bytes) -> int:
    """An open file with this content, which nobody can change."""
    number = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(number, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(number, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(number, fcntl.F_ADD_SEALS, seals)
    return number


async def _readable(number: int) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(number, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(number)


def _close(numbers: Iterable[int]) -> None:
    for number in numbers:
        os.close(number)


def _last_line(output: bytes) -> str:
    return (output.decode(errors="replace").strip().splitlines() or [""])[-1][:500]
