"""What is podman's own of a sandbox; what both makers owe is in test_escapes.py and test_sandbox.py."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from sf_core.agents.sandbox import Sandbox, SandboxError, podman, why_no_sandbox
from sf_core.agents.sandbox import porter as porter_module
from sf_core.agents.sandbox.bubblewrap import PORTER
from sf_core.config.programs import SandboxLimits
from tests.bench import sandboxes, waits


def containers(image: str) -> list[str]:
    words = ("podman", "ps", "--all", "--quiet", "--filter", f"ancestor={image}")
    return subprocess.run(words, check=True, capture_output=True, encoding="utf-8").stdout.split()


def test_it_is_told_the_limits_of_a_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "podman").write_text("", encoding="utf-8")
    (tmp_path / "podman").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    limits = SandboxLimits(image="an-image", memory_mb=100, disk_mb=7, processes=9, paths=("/opt/tool",))
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1, 5000))
    words = podman.command_line(limits, ["python3", PORTER], ["/home/me/agent"])
    tmpfs = "rw,exec,nosuid,nodev,size=7m"
    assert words == [
        *(
            "/bin/sh",
            "-c",
            'cd /proc && exec "$@" 3<&0 </dev/null',
            "sh",
            f"{tmp_path}/podman",
            "run",
            "--rm",
        ),
        *("--pull=never", "--log-driver=none", "--network=none", "--hostname=sandbox", "--read-only"),
        *(
            "--read-only-tmpfs=false",
            "--user=1000:1000",
            "--cap-drop=all",
            "--security-opt=no-new-privileges",
        ),
        *("--workdir=/sandbox", "--security-opt=unmask=/proc/sys", "--memory=132m", "--memory-swap=132m"),
        *("--pids-limit=10", "--shm-size=64m", "--ulimit=nofile=5000:5000", "--ulimit=nproc=5000:5000"),
        *("--tmpfs", f"/sandbox:{tmpfs},mode=0755,U", "--tmpfs", f"/tmp:{tmpfs},mode=1777,U"),
        *("--volume", f"{porter_module.__file__}:{PORTER}:ro", "--volume", "/opt/tool:/opt/tool:ro"),
        *("--volume", "/home/me/agent:/home/me/agent:ro", "--preserve-fds=1", "--entrypoint=", "an-image"),
        *("python3", PORTER),
    ]


def test_an_image_needs_podman(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    why_no_sandbox.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        SandboxError, match=r"^podman is not installed on this host, but sandbox\.image needs it$"
    ):
        sandboxes.run("true", limits=SandboxLimits(image="docker.io/library/python:3.12"))
    why_no_sandbox.cache_clear()


@pytest.mark.usefixtures("podman")
def test_an_image_that_is_not_there_is_refused_and_not_pulled() -> None:
    told = (
        r"^a sandbox of the image localhost/nowhere cannot be created here \(.*not known\): run `podman pull`"
    )
    with pytest.raises(SandboxError, match=told):
        sandboxes.run("true", limits=SandboxLimits(image="localhost/nowhere"))


def test_memory_is_held_by_its_control_group(
    podman: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = "import os\nfd = os.memfd_create('a')\nfor _ in range(300):\n    os.write(fd, bytes(1 << 20))"
    ended = sandboxes.run("python3", "-c", script, limits=SandboxLimits(image=podman, memory_mb=128))
    assert (ended.status, ended.ended_by) == (-9, "memory")
    assert list(tmp_path.iterdir()) == []


WORKER = """
import asyncio, sys
from sf_core.agents.sandbox import open_sandbox
from sf_core.config.programs import SandboxLimits
async def work():
    async with open_sandbox(SandboxLimits(image=sys.argv[1])) as box:
        print("begun", flush=True)
        await box.run(["sh", "-c", "setsid -f sleep 1000; sleep 1000 & wait"], timeout_s=1000)
asyncio.run(work())
"""


def test_a_worker_that_is_killed_leaves_no_container(podman: str) -> None:
    worker = subprocess.Popen([sys.executable, "-c", WORKER, podman], stdout=subprocess.PIPE)
    try:
        assert worker.stdout is not None and worker.stdout.readline() == b"begun\n"
        assert len(containers(podman)) == 1
    finally:
        worker.kill()
        worker.wait(waits.patience())
        worker.stdout.close()
    waits.wait_until(lambda: not containers(podman), "the end of the container")


async def test_a_cancelled_command_leaves_no_container(podman: str) -> None:
    begun = asyncio.Event()

    async def work(box: Sandbox) -> None:
        begun.set()
        await box.run(["sleep", "1000"], timeout_s=waits.patience())

    working = asyncio.create_task(sandboxes.opened(work, SandboxLimits(image=podman)))
    await begun.wait()
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    waits.wait_until(lambda: not containers(podman), "the end of the container")
