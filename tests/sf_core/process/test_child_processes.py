"""The keeper by itself: whom it ends, whom it lets end, and what it leaves."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from sf_core.process.child_processes import remove, start_kept
from tests.bench.waits import patience, wait_until


@contextmanager
def kept(
    words: Sequence[str], folder: str = "", grace_s: float = 0.0
) -> Iterator[tuple[subprocess.Popen[str], socket.socket]]:
    """A keeper with its command, and our end of its channel. What the command prints can be read."""
    ours, keeper = start_kept(words, grace_s=grace_s, folder=folder, stdout=subprocess.PIPE, encoding="utf-8")
    ours.settimeout(patience())
    with keeper, ours:
        yield keeper, ours
        ours.close()
        assert keeper.wait(patience()) == 0


def told(channel: socket.socket) -> list[dict[str, object]]:
    """All that the keeper says until it ends."""
    found = b""
    while part := channel.recv(4096):
        found += part
    return [json.loads(line) for line in found.splitlines()]


def process(keeper: subprocess.Popen[str]) -> psutil.Process:
    """The process whose number is the next line that the command prints."""
    assert keeper.stdout is not None
    return psutil.Process(int(keeper.stdout.readline()))


def test_a_command_that_ends_ends_its_keeper_which_tells_the_status() -> None:
    with kept(["sh", "-c", "exit 3"]) as (_, channel):
        assert told(channel) == [{"error": None}, {"status": 3}]
    with kept(["sh", "-c", "kill -9 $$"]) as (_, channel):
        assert told(channel) == [{"error": None}, {"status": -9}]


def test_a_command_that_cannot_be_started_is_told(tmp_path: Path) -> None:
    with kept([str(tmp_path / "nobody")]) as (_, channel):
        [line] = told(channel)
        assert str(line["error"]).startswith("[Errno 2] No such file or directory")


DAEMON = "setsid -f sh -c 'trap \"\" TERM; echo $$; exec sleep 1000'"


def test_who_left_the_group_and_its_parent_is_ended_with_the_command() -> None:
    with kept(["sh", "-c", f"{DAEMON}; sleep 1000"]) as (keeper, channel):
        daemon = process(keeper)
        # its parent dies, and its session is another
        wait_until(lambda: daemon.ppid() == keeper.pid, "the keeper to have it", every_s=0.01)
        channel.shutdown(socket.SHUT_WR)
        assert told(channel)[-1] == {"status": -signal.SIGKILL}
        assert not daemon.is_running()


def test_signals_reach_the_command_and_not_its_keeper() -> None:
    with kept(["sh", "-c", "trap 'echo bye; exit 4' TERM; echo $$; while :; do sleep 0.01; done"]) as (
        keeper,
        channel,
    ):
        command = process(keeper)
        keeper.send_signal(signal.SIGTERM)
        keeper.send_signal(signal.SIGINT)
        command.terminate()
        assert told(channel)[-1] == {"status": 4}
        assert keeper.stdout is not None and keeper.stdout.read() == "bye\n"


def test_within_the_grace_a_command_may_end_by_itself() -> None:
    words = ["sh", "-c", "trap 'echo bye; exit 4' TERM; echo $$; while :; do sleep 0.01; done"]
    with kept(words, grace_s=patience()) as (keeper, channel):
        command = process(keeper)
        channel.shutdown(socket.SHUT_WR)
        assert told(channel)[-1] == {"status": 4}
        assert not command.is_running()


SHARED_MEMORY = """
import time
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=16)
print(memory.name, flush=True)
while True:
    time.sleep(1000)
"""


def test_resource_trackers_remove_the_shared_memory_that_the_killed_leave() -> None:
    with kept([sys.executable, "-c", SHARED_MEMORY]) as (keeper, channel):
        assert keeper.stdout is not None
        name = keeper.stdout.readline().strip()
        assert Path("/dev/shm", name).exists()
        channel.shutdown(socket.SHUT_WR)
        told(channel)
        assert not Path("/dev/shm", name).exists()


def test_a_command_that_only_names_a_resource_tracker_is_told_to_end_like_others() -> None:
    speaks = "import os, time; print(os.getpid(), flush=True); time.sleep(1000)  # resource_tracker"
    with kept([sys.executable, "-c", speaks], grace_s=patience()) as (keeper, channel):
        process(keeper)
        channel.shutdown(socket.SHUT_WR)
        assert told(channel)[-1] == {"status": -signal.SIGTERM}


CHAIN = """
import os, time
if os.fork():
    print(flush=True)
    time.sleep(1000)
while os.fork() == 0:
    time.sleep(0.2)
time.sleep(0.15)
"""


def test_a_chain_of_short_lived_forks_is_ended() -> None:
    with kept([sys.executable, "-c", CHAIN]) as (keeper, channel):
        assert keeper.stdout is not None
        keeper.stdout.readline()
        channel.shutdown(socket.SHUT_WR)
        assert told(channel)[-1] == {"status": -signal.SIGKILL}


def test_the_folder_stays_until_the_channel_ends(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "answer").write_text("42", encoding="utf-8")
    with kept(["true"], str(folder)) as (_, channel):
        lines = b""
        while lines.count(b"\n") < 2:
            lines += channel.recv(4096)
        assert (folder / "answer").read_text(encoding="utf-8") == "42"
        channel.shutdown(socket.SHUT_WR)
        assert told(channel) == []
        assert not folder.exists()


def test_a_folder_is_removed_with_its_unreadable_parts_but_not_what_links_lead_to(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    elsewhere = tmp_path / "elsewhere"
    (folder / "closed" / "inner").mkdir(parents=True)
    (folder / "closed" / "inner" / "file").write_text("x", encoding="utf-8")
    elsewhere.mkdir(mode=0o500)
    (folder / "link").symlink_to(elsewhere)
    (folder / "closed").chmod(0)
    remove(str(folder))
    assert not folder.exists()
    assert elsewhere.stat().st_mode & 0o777 == 0o500


@pytest.mark.parametrize("name", ["missing", "missing/deeper"])
def test_a_folder_that_is_gone_is_no_error(tmp_path: Path, name: str) -> None:
    remove(str(tmp_path / name))
