"""supervisord as we use it, with real processes that are killed."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from supervisor import loggers
from supervisor.options import ServerOptions

from sf_core.cli.stack.local import local_stack
from sf_core.cli.stack.processes import Part
from sf_core.cli.stack.supervisor import StackError, Supervisor, call, make_configuration, read_pid
from sf_core.cli.stack.supervisord_child import refuse_links
from sf_core.process.child_processes import MARK
from storage.errors import StorageError
from tests.bench.waits import patience, wait_until

SLEEP = ["sleep", "300"]
COMMAND = """
import sys, time
from pathlib import Path
from sf_core.cli.stack.local import local_stack
from sf_core.cli.stack.processes import Part

with local_stack(Path(sys.argv[1])) as stack:
    stack.stop_s = 0
    stack.start(Part("polite", ["sleep", "300"]), Part("stubborn", ["sh", "-c", sys.argv[2]]))
    print(stack.folder, flush=True)
    time.sleep(300)
"""
STUBBORN = "trap '' TERM; setsid sleep 300 & while :; do sleep 1; done"
"""Shell command that ignores SIGTERM and has a child outside its process group."""


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Supervisor]:
    with local_stack(tmp_path / "logs") as stack:
        yield stack


def marked(folder: str) -> list[psutil.Process]:
    """Processes of a stack that are still there."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == folder and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize("name", ["a", "supervisord"])
def test_a_log_is_not_written_through_a_link(tmp_path: Path, stack: Supervisor, name: str) -> None:
    (tmp_path / "precious").write_bytes(b"mine")
    (tmp_path / "logs").mkdir()
    (link := tmp_path / "logs" / f"{name}.log").symlink_to(tmp_path / "precious")
    with pytest.raises(StackError) as refused:
        stack.start(Part("a", SLEEP))
    assert str(refused.value) == f"{link} is a link, but must be a file: remove or rename it"
    assert (tmp_path / "precious").read_bytes() == b"mine"


def test_supervisord_opens_no_link_as_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loggers, "open", open, raising=False)
    refuse_links()
    (link := tmp_path / "a.log").symlink_to(tmp_path / "precious")
    with pytest.raises(StorageError, match=r"a\.log is a link, but must be a file"):
        loggers.FileHandler(str(link))
    loggers.FileHandler(str(tmp_path / "b.log")).close()
    assert not (tmp_path / "precious").exists() and (tmp_path / "b.log").is_file()


def test_supervisord_reads_a_part_as_it_is(tmp_path: Path) -> None:
    part = Part("a", ["run", "50%", "two words"], {"B": """say "50%" or '\\'"""}, gives_way=True)
    file = tmp_path / "supervisord.conf"
    file.write_text(make_configuration(tmp_path, tmp_path, [part], stop_s=2), encoding="utf-8")
    options = ServerOptions()
    options.realize(["-c", str(file)])
    read = options.process_group_configs[0].process_configs[0]
    environment = [f"B={part.env['B']}"]
    assert shlex.split(read.command) == ["nice", "-n", "10", "env", *environment, *part.command]
    assert (read.name, read.stdout_logfile) == ("a", f"{tmp_path}/a.log")


def test_a_part_that_is_killed_is_started_again_and_one_that_runs_once_is_not(stack: Supervisor) -> None:
    [kept] = stack.start(Part("kept", SLEEP))
    [once] = stack.start(Part("once", SLEEP, once=True))
    before = stack.pids()
    for pid in before.values():
        psutil.Process(pid).kill()
    wait_until(lambda: kept.pid() not in (0, before["kept"]), "another one", every_s=0.1)
    assert (kept.code(), once.code(), once.pid()) == (None, -1, 0)


def test_a_part_that_was_removed_is_gone_and_its_name_is_free(stack: Supervisor) -> None:
    [process] = stack.start(Part("a", SLEEP))
    child = psutil.Process(process.pid())
    stack.remove(process)
    assert not child.is_running()
    [ended] = stack.start(Part("a", ["sh", "-c", "exit 3"], once=True))
    assert ended.wait(patience()) == 3
    stack.remove(ended)
    assert stack.pids() == {}


def test_a_part_that_ends_before_it_is_ready_is_named_with_its_last_words(stack: Supervisor) -> None:
    [process] = stack.start(Part("broken", ["sh", "-c", "echo no such model; exit 7"]))
    with pytest.raises(StackError, match=r"broken ended: no such model \(.*broken.log\)"):
        stack.await_ready(process, lambda: False, 20)


def test_a_supervisor_that_does_not_start_says_why(tmp_path: Path) -> None:
    program = (
        "import resource, sys; from pathlib import Path; from sf_core.cli.stack.supervisor import *\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))\n"
        "Supervisor(Path(sys.argv[1]), Path(sys.argv[1]), {}).start()\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, "-c", program, folder], capture_output=True, encoding="utf-8")
    [last] = done.stderr.strip().splitlines()[-1:]
    assert "StackError: supervisord does not start: Error: The minimum number of file descriptors" in last


def test_a_supervisor_that_does_not_answer_is_named(
    stack: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack.start(Part("waits", ["sleep", "1000"]))
    daemon = psutil.Process(read_pid(stack.folder))
    monkeypatch.setattr("sf_core.cli.stack.supervisor.ANSWER_S", 0.3)
    daemon.suspend()
    try:
        with pytest.raises(TimeoutError, match=r"supervisord, .* of .*, did not answer getPID for 0 s"):
            call(stack.folder, "getPID")
    finally:
        daemon.resume()


def test_parts_end_with_a_supervisor_that_is_killed(stack: Supervisor) -> None:
    [process] = stack.start(Part("a", SLEEP))
    pid = read_pid(stack.folder)
    assert pid
    psutil.Process(pid).kill()
    wait_until(lambda: marked(str(stack.folder)) == [], "all to end", every_s=0.1)
    with pytest.raises(StackError, match=r"supervisord ended, and a with it; log: .*supervisord.log"):
        process.code()


def test_a_process_whose_parent_ended_before_it_could_say_so_ends_too() -> None:
    # the supervisor that is killed between the fork of a part and the part's first instruction
    program = """
import os, signal, time
from sf_core.process.child_processes import end_with

parent = os.getpid()
signal.signal(signal.SIGTERM, lambda *_: None)
if os.fork():
    os._exit(0)
while os.getppid() == parent:
    time.sleep(0.01)
print("alone", flush=True)
end_with(parent)
print("still there", flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=patience(), encoding="utf-8"
    )
    assert (done.stdout, done.stderr) == ("alone\n", "")


def test_nothing_remains_of_a_command_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", COMMAND, str(tmp_path), STUBBORN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ, encoding="utf-8") as process:
        assert process.stdout
        folder = process.stdout.readline().strip()
        wait_until(lambda: len(marked(folder)) >= 4, "all to run", every_s=0.1)
        process.kill()
        wait_until(lambda: marked(folder) == [], "all to end", every_s=0.1)


def test_a_folder_whose_path_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StackError, match="too long for a socket; choose a shorter path"):
        Supervisor(tmp_path / ("x" * 100), tmp_path, {})
