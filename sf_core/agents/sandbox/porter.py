"""The first process of a sandbox: does inside what its worker asks for.

    python -I -S porter.py CHANNEL NAME=VALUE...

CHANNEL is a socket whose other end only the worker holds. At its end the porter exits, and with its first
process the kernel ends all that is inside, however the worker has ended. Nobody inside can signal the first
process, and nobody can trace it or open its files in /proc, because it cannot be dumped.

A request is a word with open files: the first holds the particulars, the others become standard input, output
and error of a command. An answer is a few words. The folder that the porter is started in is the work folder.
"""

from __future__ import annotations

import array
import ctypes
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace

HOME = "/tmp/home"
SHARED = "/dev/shm"

NOBODY = 65534
"""User of the host that a worker of root has its sandboxes run as."""

USER = 1000
"""The same user, as it is called inside."""

PR_SET_DUMPABLE = 4
CLONE_NEWUSER = 0x10000000
CAPABILITY_VERSION = 0x20080522

LOOK_S = 0.2
"""Seconds between looks at the memory in use."""

INODE_BYTES = 1024
"""Memory of the kernel that a file takes, however small it is."""

KILLS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
"""Files of a container, by the version of control groups, that tell how many of its processes the kernel has
killed because there was no memory left."""

LIBC = ctypes.CDLL(None, use_errno=True)

Become = Callable[[list[str], dict[str, str]], None]
"""Makes a process that of a command, which has these words and variables; does not return."""


class Porter:
    def __init__(self, channel: socket.socket, limits: SimpleNamespace) -> None:
        self._channel = channel
        self._limits = limits
        self._wake, waker = os.pipe()
        for end in (self._wake, waker):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(waker)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # Python's handler would let a program inside end the sandbox
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def serve(self) -> None:
        """Do what is asked for until the worker is gone."""
        while True:
            word, files = self._read_request()
            try:
                if word in RUNS:
                    self._answer(self._run(files, RUNS[word]))
                elif word == "write":
                    write(files[0])
                    self._answer("written")
            except OSError as error:
                self._answer(f"error {error}")
            finally:
                close(files)

    def greet(self) -> None:
        """Give the worker the work folder, a socket on which programs inside reach the worker, and this
        process, with which all inside ends."""
        folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
        process = os.pidfd_open(os.getpid())
        with suppress(ConnectionError), socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
            socket.send_fds(self._channel, [b"ready"], [folder, listener.fileno(), process])
        close([folder, process])

    def _read_request(self) -> tuple[str, list[int]]:
        message, files = receive(self._channel, 64, 4)
        if not message:
            os._exit(0)
        return message.decode(), files

    def _answer(self, words: str) -> None:
        with suppress(ConnectionError):
            self._channel.sendall(words.encode(errors="replace")[:2048])

    def _run(self, files: list[int], become: Become) -> str:
        """Run a command until it ends or the worker says so; none of its processes is left."""
        words, variables = command_of(files[0])
        pid = start(become, words, variables, files[1:], self._limits)
        # or no reader would ever see their end
        close(files)
        ended_by = "exit"
        status = None
        killed = num_killed()
        while status is None:
            status = self._reap(pid)
            if status is None:
                if self._doze():
                    word, files = self._read_request()
                    close(files)
                    if word == "kill":
                        kill_all()
                elif memory_in_use() > self._limits.memory:
                    ended_by = "memory"
                    kill_all()
        kill_all()
        with suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
        if num_killed() > killed:
            ended_by = "memory"
        return f"ended {status} {ended_by}"

    def _reap(self, command: int) -> int | None:
        """Take note of the children that have ended; returns the exit status of the command if it has."""
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == command:
                return os.waitstatus_to_exitcode(status)
            if pid == 0:
                return None

    def _doze(self) -> bool:
        """Wait for the end of a child, the time to look, or a request; returns whether there is one."""
        sources = select.poll()
        for number in (self._wake, self._channel.fileno()):
            sources.register(number, select.POLLIN)
        ready = sources.poll(LOOK_S * 1000)
        with suppress(BlockingIOError):
            while os.read(self._wake, 512):
                pass
        return any(number != self._wake for number, _ in ready)


def become_nobody() -> None:
    """Give up the rights of root and all ways back to them, further user namespaces among them."""
    os.umask(0o022)
    # of all that runs here, the kernel ends first what is inside, and there commands before their porter
    put("/proc/self/oom_score_adj", "500")
    is_root = os.getuid() == 0
    if is_root:
        os.chown(".", NOBODY, NOBODY)
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        # what has changed its user cannot write its own maps otherwise
        LIBC.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
    user = os.getuid()
    group = os.getgid()
    # where it is a user of its own, processes are counted for each sandbox alone
    if LIBC.unshare(CLONE_NEWUSER) == 0:
        put("/proc/self/setgroups", "deny")
        put("/proc/self/uid_map", f"{USER} {user} 1")
        put("/proc/self/gid_map", f"{USER} {group} 1")
        put("/proc/sys/user/max_user_namespaces", "0")
        # who makes a user namespace has all rights in it until he executes another program
        nothing = (ctypes.c_uint32 * 6)()
        if LIBC.capset((ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), nothing) != 0:
            raise OSError(ctypes.get_errno(), "capabilities cannot be dropped")
    elif is_root:
        raise OSError(ctypes.get_errno(), "user namespaces cannot be created")
    LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    os.mkdir(HOME)


def put(path: str, content: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(content)


def receive(channel: socket.socket, most_bytes: int, most_files: int) -> tuple[bytes, list[int]]:
    """A message and the open files that came with it, which no program started here inherits."""
    files = array.array("i")
    room = socket.CMSG_LEN(most_files * files.itemsize)
    # socket.recv_fds would ignore the flag
    message, ancillary, _, _ = channel.recvmsg(most_bytes, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            files.frombytes(content[: len(content) - len(content) % files.itemsize])
    return message, list(files)


def close(files: list[int]) -> None:
    while files:
        os.close(files.pop())


def command_of(particulars: int) -> tuple[list[str], dict[str, str]]:
    """The words of a command and its variables: their number, and then all of them, each ended by a zero."""
    with open(particulars, "rb", closefd=False) as file:
        parts = file.read().split(b"\0")[:-1]
    number, *rest = map(os.fsdecode, parts)
    num_words = int(number)
    variables: dict[str, str] = {}
    for setting in rest[num_words:]:
        name, _, value = setting.partition("=")
        variables[name] = value
    return rest[:num_words], variables


def start(
    become: Become, words: list[str], variables: dict[str, str], standard: list[int], limits: SimpleNamespace
) -> int:
    """Start a process that becomes this command; returns its number. Raises OSError if it cannot run."""
    failure, telling = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            for number, file in enumerate(standard):
                os.dup2(file, number)
            os.setsid()
            for number in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            be_ended_first()
            limit(limits)
            become(words, variables)
        except OSError as error:
            os.write(telling, (error.strerror or str(error)).encode())
        finally:
            os._exit(127)
    os.close(telling)
    with open(failure, "rb") as report:
        reason = report.read()
    if reason:
        os.waitpid(pid, 0)
        raise OSError(f"{words[0]} cannot be started: {reason.decode()}")
    return pid


def execute(words: list[str], variables: dict[str, str]) -> None:
    os.execvpe(words[0], words, variables)


def interpret(words: list[str], variables: dict[str, str]) -> None:
    """Run a source of the worker's in this copy of the porter: a new Python would take long to begin."""
    # nothing of the porter is open in it; the last of these tells the porter that it has begun
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.update(variables)
    status = 0
    try:
        exec(words[0], {"__name__": "__main__"})
        sys.stdout.flush()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    os._exit(status)


RUNS = {"run": execute, "interpret": interpret}
"""Requests that run something, and how its process becomes it."""


def be_ended_first() -> None:
    """Have the kernel end this copy of the porter before the porter itself when there is no memory left."""
    LIBC.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
    put("/proc/self/oom_score_adj", "1000")
    LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def limit(limits: SimpleNamespace) -> None:
    for kind, most in (
        (resource.RLIMIT_DATA, limits.memory),
        # the porter is one of them
        (resource.RLIMIT_NPROC, limits.processes + 1),
        (resource.RLIMIT_CPU, limits.cpu),
        (resource.RLIMIT_NOFILE, limits.files),
        (resource.RLIMIT_FSIZE, limits.disk),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        if hard != resource.RLIM_INFINITY:
            most = min(most, hard)
        resource.setrlimit(kind, (most, most))


def kill_all() -> None:
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)


def num_killed() -> int:
    for path in KILLS:
        with suppress(OSError), open(path, encoding="utf-8") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
    return 0


def memory_in_use() -> int:
    """Memory in bytes of all processes but this one, and of files. Memory that processes share is counted for
    each of them."""
    total = 0
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            # what has ended meanwhile cannot be read
            with suppress(OSError), open(f"/proc/{name}/status", "rb") as file:
                for line in file:
                    if line.startswith((b"RssAnon", b"RssShmem")):
                        total += int(line.split()[1]) * 1024
    for folder in (".", "/tmp", SHARED):
        use = os.statvfs(folder)
        total += (use.f_blocks - use.f_bfree) * use.f_frsize + (use.f_files - use.f_ffree) * INODE_BYTES
    return total


def write(particulars: int) -> None:
    """Write files into the work folder: a line with the size and the name of each, then its content. What is
    in their way is put aside."""
    with open(particulars, "rb", closefd=False) as file:
        while line := file.readline():
            size, _, encoded = line.rstrip(b"\n").partition(b" ")
            name = os.fsdecode(bytes.fromhex(encoded.decode()))
            content = file.read(int(size))
            write_file(name, content)


def write_file(name: str, content: bytes) -> None:
    folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        *parents, last = name.split("/")
        for parent in parents:
            inner = inner_folder(folder, parent)
            os.close(folder)
            folder = inner
        with suppress(FileNotFoundError):
            put_aside(folder, last)
        # a script is known by its first line, as the kernel knows it
        mode = 0o755 if content.startswith(b"#!") else 0o644
        number = os.open(last, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode, dir_fd=folder)
        with open(number, "wb") as file:
            file.write(content)
    finally:
        os.close(folder)


def inner_folder(folder: int, name: str) -> int:
    """The folder of this name, opened, made if need be; links are none."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    with suppress(OSError):
        return os.open(name, flags, dir_fd=folder)
    with suppress(FileNotFoundError):
        put_aside(folder, name)
    os.mkdir(name, dir_fd=folder)
    return os.open(name, flags, dir_fd=folder)


def put_aside(folder: int, name: str) -> None:
    """Remove a file; a folder cannot always be removed, but it can get another name."""
    os.fchmod(folder, 0o755)
    try:
        os.unlink(name, dir_fd=folder)
    except IsADirectoryError:
        os.rename(name, f"{name}.{os.urandom(8).hex()}", src_dir_fd=folder, dst_dir_fd=folder)


if __name__ == "__main__":
    become_nobody()
    facts = dict(word.split("=") for word in sys.argv[2:])
    with socket.socket(fileno=int(sys.argv[1])) as ours:
        ours.set_inheritable(False)
        porter = Porter(ours, SimpleNamespace(**{name: int(value) for name, value in facts.items()}))
        porter.greet()
        porter.serve()
