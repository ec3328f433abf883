"""Attempts to get out of a sandbox, each by a program that runs inside."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from sf_core.agents.sandbox import Ended, Sandbox
from sf_core.agents.sandbox.forward import MAX_CONNECTIONS
from sf_core.config.programs import SandboxLimits
from sf_core.types import Endpoint
from tests.bench import sandboxes, waits

pytestmark = pytest.mark.usefixtures("maker")

only_bubblewrap = pytest.mark.parametrize("maker", ["bubblewrap"], indirect=True)
"""Marks a test whose twin for podman is in test_podman.py."""

SMALL = SandboxLimits(memory_mb=256, disk_mb=32, processes=32, output_mb=1)


def python(script: str, *words: str, **settings: object) -> str:
    """What a Python script prints inside."""
    ended = sandboxes.run("python3", "-c", script, *words, **settings)
    assert ended.status == 0, ended.output
    return ended.output


def source(script: str) -> str:
    """What it prints if the Python that is inside already runs it."""
    ended = sandboxes.inside(lambda box: box.run_python(script, timeout_s=waits.patience()))
    assert ended.status == 0, ended.output
    return ended.output


def test_no_network_is_reached() -> None:
    script = (
        "import socket, sys\n"
        "port = int(sys.argv[1])\n"
        "unix, inet = socket.AF_UNIX, socket.AF_INET\n"
        "places = (inet, ('1.1.1.1', 53)), (inet, ('127.0.0.1', port)), (unix, '\\0' + sys.argv[2])\n"
        "for family, address in places:\n"
        "    print(socket.socket(family).connect_ex(address))\n"
        "print([name for _, name in socket.if_nameindex()])\n"
    )
    abstract = f"sf-test-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind(f"\0{abstract}")
        local.listen()
        said = python(script, str(server.getsockname()[1]), abstract)
    expected = errno.ENETUNREACH, errno.ECONNREFUSED, errno.ECONNREFUSED, ["lo"]
    assert said.splitlines() == list(map(str, expected))


CONNECT = """
import socket, sys
connections = []
for _ in range(90):
    connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    connection.sendall(b"GET /sessions/s/v1/models HTTP/1.1\\r\\n\\r\\n")
    connections.append(connection)
for connection in connections:
    assert connection.recv(9) == b"HTTP/1.1 "
    connection.close()
"""


async def test_its_connections_do_not_take_all_open_files_of_the_worker() -> None:
    async with asyncio.timeout(waits.patience()):
        num_open = 0
        most = 0

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal num_open, most
            num_open += 1
            most = max(most, num_open)
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            await reader.read()
            num_open -= 1
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        endpoint = Endpoint(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/sessions/s/v1", "k", "m")

        async def work(box: Sandbox) -> int:
            assert box.endpoint is not None
            port = str(urlsplit(box.endpoint.base_url).port)
            return (await box.run(["python3", "-c", CONNECT, port], timeout_s=waits.patience())).status

        async with server:
            status = await sandboxes.opened(work, endpoint=endpoint)
    assert status == 0 and 0 < most <= MAX_CONNECTIONS


def test_files_of_the_host_are_not_there(tmp_path: Path, maker: str) -> None:
    planted = tmp_path / "key"
    planted.write_text("secret", encoding="utf-8")
    places = [planted, Path(__file__), "/dev/shm/sf", "/etc/shadow", "/home", Path.home() / ".ssh"]
    if maker == "bubblewrap":
        # a container has its own
        places += ["/var", "/run", "/sys"]
    script = "import os, sys; print([path for path in sys.argv[1:] if os.path.exists(path)])"
    assert python(script, *map(str, places)) == "[]\n"


def test_nothing_but_its_own_folders_can_be_written() -> None:
    places = ["/", "/usr", "/etc", "/dev", "/proc/sys/kernel", sys.prefix, sys.base_prefix]
    script = (
        "import os, sys\n"
        "for place in sys.argv[1:]:\n"
        "    try:\n"
        "        open(place + '/planted', 'w')\n"
        "    except OSError:\n"
        "        continue\n"
        "    print(place)\n"
        "for path in ('/proc/sys/kernel/core_pattern', '/proc/sysrq-trigger', '/etc/passwd', '/porter.py'):\n"
        "    print(os.access(path, os.W_OK))\n"
        "os.mkdir('/tmp/mine')\n"
    )
    assert python(script, *places) == "False\n" * 4


LOOK_AT_PROC = """
import ctypes, os
own = {os.getpid(), os.getppid()}
print(sorted({int(name) for name in os.listdir("/proc") if name.isdigit()} - own))
for name in ("environ", "mem", "maps", "cwd", "root", "exe", "fd", "map_files"):
    path = f"/proc/1/{name}"
    try:
        (os.listdir if name in ("cwd", "root", "fd", "map_files") else lambda path: open(path, "rb"))(path)
        print(name)
    except OSError:
        pass
libc = ctypes.CDLL(None, use_errno=True)
attach, seize, getfd = 16, 0x4206, 438
print([libc.ptrace(request, 1, None, None) for request in (attach, seize)])
vector = (ctypes.c_void_p * 2)(ctypes.cast(ctypes.create_string_buffer(8), ctypes.c_void_p), 8)
print(libc.process_vm_readv(1, vector, 1, vector, 1, 0))
print({libc.syscall(getfd, os.pidfd_open(1), number, 0) for number in range(32)})
"""


@pytest.mark.parametrize("way", [python, source])
def test_the_first_process_can_be_neither_read_nor_traced(way: Callable[[str], str]) -> None:
    assert way(LOOK_AT_PROC) == "[]\n[-1, -1]\n-1\n{-1}\n"


def test_no_file_of_ours_is_left_open() -> None:
    async def work(box: Sandbox) -> str:
        await box.run(["true"], timeout_s=waits.patience())
        # the last of them is the folder that is listed
        return (await box.run(["ls", "/proc/self/fd"], timeout_s=waits.patience())).output

    assert sandboxes.inside(work) == "0\n1\n2\n3\n"


def test_signals_reach_neither_the_first_process_nor_anything_outside() -> None:
    async def work(box: Sandbox) -> str:
        script = (
            "for signal in $(seq 1 64); do kill -$signal 1 $PPID; done 2>/dev/null; kill -9 -1; kill -9 0"
        )
        await box.run(["sh", "-c", script], timeout_s=waits.patience())
        return (await box.run(["echo", "alive"], timeout_s=waits.patience())).output

    assert sandboxes.inside(work) == "alive\n"


def test_there_are_no_devices_and_none_can_be_made() -> None:
    said = sandboxes.shell(
        "mknod disk b 254 0; mknod memory c 1 1; mount -t tmpfs none /tmp; ls disk memory; ls /dev"
    ).output
    assert "mknod: disk: Operation not permitted" in said and "mknod: memory: Operation not perm" in said
    devices = set(said.splitlines()[-20:])
    assert devices.isdisjoint({"kmsg", "mem", "kvm", "fuse", "vda", "sda", "nvidia0", "loop0"})
    assert {"null", "zero", "urandom", "shm"} <= devices


def test_no_program_gives_more_rights() -> None:
    script = (
        "cp /usr/bin/id own; chmod u+s,g+s own; ./own -u\n"
        "grep -E 'CapPrm|CapEff|NoNewPrivs' /proc/self/status | tr -s '\\t\\n' '  '\n"
        "unshare -U true 2>/dev/null || chroot / true 2>/dev/null || echo none"
    )
    rights = "CapPrm: 0000000000000000 CapEff: 0000000000000000 NoNewPrivs: 1 "
    assert sandboxes.shell(script).output == f"1000\n{rights}none\n"


LOOK_AT_RIGHTS = """
import ctypes, os
with open("/proc/self/status") as file:
    print([line.split()[1] for line in file if line.startswith(("CapPrm", "CapEff", "NoNewPrivs"))])
libc = ctypes.CDLL(None)
user, mounts, network = 0x10000000, 0x20000, 0x40000000
print([libc.unshare(kind) for kind in (user, mounts, network)])
try:
    open("/proc/sys/user/max_user_namespaces", "w").write("100")
except PermissionError:
    print("none")
for number in range(4096):
    try:
        os.fstat(number)
        print(number)
    except OSError:
        pass
"""


@pytest.mark.parametrize("way", [python, source])
def test_a_program_has_no_rights_and_nothing_of_the_porter_open(way: Callable[[str], str]) -> None:
    none = "0000000000000000"
    assert way(LOOK_AT_RIGHTS) == f"['{none}', '{none}', '1']\n[-1, -1, -1]\nnone\n0\n1\n2\n"


LINKS = (
    "ln -s /etc/passwd link; ln -s / root; ln -s ../.. above; ln -s link again; ln /etc/passwd hard;"
    "mkfifo pipe; mkdir deep; ln -s . deep/loop; ln -s /proc/1 deep/first; echo 1 > deep/real; echo 2 > b;"
    "python3 -c \"import socket; socket.socket(socket.AF_UNIX).bind('socket')\""
)


def test_links_and_pipes_are_no_files() -> None:
    async def work(box: Sandbox) -> dict[str, bytes]:
        await box.run(["sh", "-c", LINKS], timeout_s=waits.patience())
        return await box.files()

    assert sandboxes.inside(work) == {"deep/real": b"1\n", "b": b"2\n"}


def test_folders_without_an_end_are_read_to_one() -> None:
    script = "import os\nfor _ in range(3000):\n    os.mkdir('x' * 200); os.chdir('x' * 200)\nopen('y', 'w')"

    async def work(box: Sandbox) -> dict[str, bytes]:
        await box.run(["python3", "-c", script], timeout_s=waits.patience())
        return await box.files()

    assert sandboxes.inside(work) == {}


def test_what_is_in_the_way_of_a_file_is_put_aside() -> None:
    """Hidden tests are put over what an agent has left."""
    script = (
        "ln -s /tmp/elsewhere tests; mkdir -p b/test_b.py/inner; mkfifo c; touch d; ln -s /tmp/elsewhere e;"
        "mkdir /tmp/elsewhere f; touch f/g; chmod 500 f; mkdir -m 0 h"
    )
    names = ("tests/test_a.py", "b/test_b.py", "c", "d/test_d.py", "e", "f/g", "h/i")

    async def work(box: Sandbox) -> dict[str, bytes]:
        await box.run(["sh", "-c", script], timeout_s=waits.patience())
        await box.write(dict.fromkeys(names, b"ours"))
        assert (await box.run(["ls", "/tmp/elsewhere"], timeout_s=waits.patience())).output == ""
        return await box.files()

    assert sandboxes.inside(work) == dict.fromkeys(names, b"ours")


def test_what_a_command_leaves_running_ends_with_it() -> None:
    daemon = "setsid -f sh -c 'trap \"\" TERM HUP; echo $$ > daemon; sleep 1000'"
    count = "set -- /proc/[0-9]*; echo $#"

    async def work(box: Sandbox) -> tuple[str, Ended, str]:
        await_daemon = "while [ ! -s daemon ]; do sleep 0.01; done"
        await box.run(["sh", "-c", f"{daemon}; {await_daemon}"], timeout_s=waits.patience())
        first = await box.run(["sh", "-c", f"{count}; rm daemon"], timeout_s=waits.patience())
        late = await box.run(["sh", "-c", f"{daemon}; {await_daemon}; echo begun; sleep 1000"], timeout_s=2)
        second = await box.run(["sh", "-c", count], timeout_s=waits.patience())
        return first.output, late, second.output

    # the first process and the shell
    assert sandboxes.inside(work) == ("2\n", Ended(-9, "time", "begun\n"), "2\n")


def test_a_fork_bomb_ends_in_time() -> None:
    async def work(box: Sandbox) -> tuple[str, str]:
        bomb = await box.run(["bash", "-c", ":(){ :|:& };:; sleep 1000"], timeout_s=1)
        return bomb.ended_by, (await box.run(["echo", "alive"], timeout_s=waits.patience())).output

    assert sandboxes.inside(work, SMALL) == ("time", "alive\n")


def test_a_full_disk_is_its_own() -> None:
    script = (
        "for folder in . /tmp /dev/shm; do\n"
        "for name in a b c; do head -c 30000000 /dev/zero > $folder/$name; done\n"
        "du -smx $folder | cut -f1; rm $folder/?; done 2>/dev/null"
    )
    sizes = [int(size) for size in sandboxes.shell(script, limits=SMALL).output.split()]
    assert sizes[:2] == [32, 32] and sizes[2] <= 64


def test_a_file_has_a_limit() -> None:
    assert sandboxes.shell("head -c 33554433 /dev/zero > a", limits=SMALL).status != 0


def test_gigabytes_of_output_end_it() -> None:
    ended = sandboxes.shell("echo begin; head -c 10000000000 /dev/zero", limits=SMALL)
    assert (ended.status, ended.ended_by) == (-9, "output")
    assert ended.output.startswith("begin\n") and len(ended.output) < 2**17


SHARE = (
    "import mmap, time\nblock = mmap.mmap(-1, 300 << 20)\n"
    "while block.tell() < len(block):\n    block.write(bytes(1 << 20))\ntime.sleep(1000)"
)
FORK = "import os, time\nfor _ in range(3):\n    os.fork()\nblock = b'x' * (90 << 20)\ntime.sleep(1000)"


@pytest.mark.parametrize("script", [SHARE, FORK])
def test_processes_together_have_a_limit_on_memory(script: str) -> None:
    ended = sandboxes.run("python3", "-c", script, limits=SMALL)
    assert (ended.status, ended.ended_by) == (-9, "memory")


def test_many_small_files_are_memory_too() -> None:
    script = "import itertools, os\nfor number in itertools.count():\n    os.mknod(str(number))"
    ended = sandboxes.run("python3", "-c", script, limits=SandboxLimits(memory_mb=64))
    assert (ended.status, ended.ended_by) == (-9, "memory")


def test_a_process_has_limits() -> None:
    memory = "try:\n    bytes(300 << 20)\nexcept MemoryError:\n    print('no memory')"
    assert python(memory, limits=SMALL) == "no memory\n"
    files = (
        "try:\n    [open('/dev/null') for _ in range(20)]\nexcept OSError as error:\n    print(error.errno)"
    )
    assert python(files, limits=SandboxLimits(open_files=16)) == f"{errno.EMFILE}\n"
    assert sandboxes.shell("while :; do :; done", limits=SandboxLimits(cpu_s=1)).status == -9


WORKER = """
import asyncio, sys
from sf_core.agents.sandbox import open_sandbox
from sf_core.agents.sandbox.forward import MAX_CONNECTIONS
from sf_core.config.programs import SandboxLimits
from sf_core.types import Endpoint
async def work():
    async with open_sandbox(SandboxLimits(), {"a": b"a"}) as box:
        print("begun", flush=True)
        await box.run(["sh", "-c", "setsid -f sleep 1000; sleep 1000 & wait"], timeout_s=1000)
asyncio.run(work())
"""


def mounts() -> list[str]:
    """Lines of /proc/mounts, but for network namespaces, which tests beside this one make."""
    return [
        line
        for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
        if "/run/netns" not in line
    ]


@only_bubblewrap
def test_a_worker_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    before = mounts()
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    variables = os.environ | {"TMPDIR": str(scratch)}
    worker = subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE, env=variables)
    try:
        assert worker.stdout is not None and worker.stdout.readline() == b"begun\n"
        # bubblewrap, the porter, the shell and two that sleep
        family = psutil.Process(worker.pid)
        waits.wait_until(lambda: len(family.children(recursive=True)) == 5, "the command", every_s=0.01)
        processes = family.children(recursive=True)
    finally:
        worker.kill()
        worker.wait(waits.patience())
        worker.stdout.close()
    _, alive = psutil.wait_procs(processes, timeout=waits.patience())
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
    assert list(scratch.iterdir()) == [] and mounts() == before


@only_bubblewrap
async def test_a_sandbox_that_is_left_by_a_cancelled_command_leaves_nothing() -> None:
    async def work(box: Sandbox) -> None:
        await box.run(["sleep", "1000"], timeout_s=waits.patience())

    own = psutil.Process()
    others = {*own.children(recursive=True)}
    working = asyncio.create_task(sandboxes.opened(work))
    while not any(child.name() == "sleep" for child in own.children(recursive=True)):
        await asyncio.sleep(0.01)
    processes = {*own.children(recursive=True)} - others
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    _, alive = psutil.wait_procs(processes, timeout=waits.patience())
    assert alive == []
