"""A sandbox as its users see it: files in, commands, files out, and what is wrong in one sentence."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pydantic
import pytest

from sf_core.agents.command import CommandAgent
from sf_core.agents.command_output import CommandOutput
from sf_core.agents.sandbox import Ended, Sandbox, SandboxError, open_sandbox, why_no_sandbox
from sf_core.agents.sandbox import porter as porter_module
from sf_core.config.programs import Command, SandboxLimits
from sf_core.types import Task
from tests.bench import sandboxes
from tests.bench.waits import patience

ROOT = Path(__file__).parents[4]


@pytest.mark.usefixtures("maker")
def test_files_go_in_and_come_out_and_last_from_command_to_command() -> None:
    async def work(box: Sandbox) -> dict[str, bytes]:
        ended = await box.run(["python3", "deep/a.py"], timeout_s=patience())
        assert ended == Ended(0, "exit", "42\n")
        await box.write({"deep/b.txt": b"later\n", "\N{GREEK SMALL LETTER PI}\n\udcff": b"\0" * 5_000_000})
        ended = await box.run(["sh", "-c", "cat deep/b.txt answer; rm -r deep/*a*"], timeout_s=patience())
        assert ended.output == "later\n42"
        return await box.files()

    script = b"print(6 * 7); open('answer', 'w').write('42')"
    assert sandboxes.inside(work, files={"deep/a.py": script}) == {
        "answer": b"42",
        "deep/b.txt": b"later\n",
        "\N{GREEK SMALL LETTER PI}\n\udcff": b"\0" * 5_000_000,
    }


@pytest.mark.parametrize("name", ["/a", "../a", "a/../b", "a//b", "", "./a"])
def test_files_are_written_into_the_work_folder_only(name: str) -> None:
    with pytest.raises(ValueError, match=r"^expected the name of a file in the work folder, got '"):
        sandboxes.inside(lambda box: box.write({name: b""}))


def test_a_command_is_given_standard_input_variables_and_the_workers_python() -> None:
    async def work(box: Sandbox) -> str:
        script = (
            "cat; echo $MINE $LANG $HOME; touch $HOME/a $TMPDIR/b; python3 -m pytest --version > /dev/stderr"
        )
        ended = await box.run(
            ["sh", "-c", script], stdin="\N{GREEK SMALL LETTER PI}", timeout_s=patience(), env={"MINE": "1"}
        )
        return ended.output

    assert (
        sandboxes.inside(work)
        == f"\N{GREEK SMALL LETTER PI}1 C.UTF-8 /tmp/home\npytest {pytest.__version__}\n"
    )


@pytest.mark.usefixtures("maker")
def test_a_script_may_be_executed() -> None:
    assert sandboxes.run("./a", files={"a": b"#!/bin/sh\necho 42\n"}).output == "42\n"


@pytest.mark.usefixtures("maker")
def test_standard_output_and_errors_are_heard_apart_where_that_is_wanted() -> None:
    written = CommandOutput()

    async def work(box: Sandbox) -> Ended:
        return await box.run(
            ["sh", "-c", "echo 42; echo thinking >&2"], timeout_s=patience(), written=written
        )

    assert sorted(sandboxes.inside(work).output.split()) == ["42", "thinking"]
    assert (written.answer(), written.last_lines()) == ("42\n", "thinking")


@pytest.mark.usefixtures("maker")
def test_a_command_that_cannot_be_started_is_an_error_and_the_next_one_runs() -> None:
    async def work(box: Sandbox) -> str:
        with pytest.raises(
            SandboxError, match=r"^error in the sandbox: no-such-program cannot be started: No such file"
        ):
            await box.run(["no-such-program"], timeout_s=patience())
        return (await box.run(["echo", "42"], timeout_s=patience())).output

    assert sandboxes.inside(work) == "42\n"


NUM_PROCESSES = "import os; print(sum(name.isdigit() for name in os.listdir('/proc')))"


@pytest.mark.usefixtures("maker")
def test_a_source_of_python_runs_like_a_command() -> None:
    source = """
import os, sys
print(sys.stdin.read(), os.environ["HOME"], os.listdir("."), os.getpid() == os.getsid(0), flush=True)
os.fork() or os.execvp("sleep", ["sleep", "1000"])
raise ValueError("as in any Python")
"""

    async def work(box: Sandbox) -> tuple[Ended, Ended]:
        ended = await box.run_python(source, stdin="\N{GREEK SMALL LETTER PI}", timeout_s=patience())
        return ended, await box.run_python(NUM_PROCESSES, timeout_s=patience())

    ended, left = sandboxes.inside(work, files={"a": b""})
    assert ended.output.startswith("\N{GREEK SMALL LETTER PI} /tmp/home ['a'] True\nTraceback")
    assert (ended.status, ended.output.endswith("\nValueError: as in any Python\n")) == (1, True)
    # the porter and the one that counts
    assert left == Ended(0, "exit", "2\n")


@pytest.mark.usefixtures("maker")
@pytest.mark.parametrize(
    "source, ended_by",
    [
        ("while True: pass", "time"),
        ("while True: print('x' * 2**16)", "output"),
        ("kept = [b'x' * 2**20 for _ in range(300)]", "exit"),
    ],
)
def test_a_source_of_python_has_the_limits_of_a_command(source: str, ended_by: str) -> None:
    limits = SandboxLimits(memory_mb=128, output_mb=1)
    timeout_s = 1 if ended_by == "time" else patience()
    ended = sandboxes.inside(lambda box: box.run_python(source, timeout_s=timeout_s), limits)
    assert (ended.ended_by, ended.status == 0) == (ended_by, False)


def test_commands_of_one_sandbox_run_one_after_the_other() -> None:
    async def work(box: Sandbox) -> list[Ended]:
        script = "[ -e busy ] && exit 1; touch busy; sleep 0.1; rm busy"
        return await asyncio.gather(*(box.run(["sh", "-c", script], timeout_s=patience()) for _ in range(3)))

    assert [ended.status for ended in sandboxes.inside(work)] == [0, 0, 0]


@pytest.mark.usefixtures("maker")
async def test_sandboxes_run_side_by_side_and_know_nothing_of_each_other() -> None:
    expected = [f"mine-{number} /tmp/mine-{number}\n" for number in range(8)]
    async with asyncio.timeout(patience()):
        begun = asyncio.Barrier(8)

        async def one(number: int) -> str:
            async with open_sandbox(sandboxes.made(SandboxLimits())) as box:
                script = f"touch mine-{number} /tmp/mine-{number}"
                await box.run(["sh", "-c", script], timeout_s=patience())
                await begun.wait()
                return (await box.run(["sh", "-c", "echo mine* /tmp/mine*"], timeout_s=patience())).output

        assert await asyncio.gather(*map(one, range(8))) == expected


@pytest.mark.usefixtures("maker")
def test_a_sandbox_ends_with_a_cancelled_command() -> None:
    async def work(box: Sandbox) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(box.run(["sleep", "1000"], timeout_s=patience()), 0.1)
        with pytest.raises(SandboxError, match=r"^the sandbox has ended$"):
            await box.run(["true"], timeout_s=patience())

    sandboxes.inside(work)


FAKE = """
import os, socket, sys
channel = socket.socket(fileno=int(sys.argv[1]))
folder = os.open(".", os.O_RDONLY)
listener = socket.create_server(("127.0.0.1", 0))
{begin}
channel.recv(64)
{answer}
channel.recv(64)
"""
BEGIN = "socket.send_fds(channel, [b'ready'], [folder, listener.fileno(), os.pidfd_open(1)])"


@pytest.mark.usefixtures("maker")
@pytest.mark.parametrize(
    ("begin", "answer", "told"),
    [
        ("channel.send(b'ready')", "", "the first message of the sandbox cannot be understood: 'ready'"),
        (
            "socket.send_fds(channel, [b'go'], [folder])",
            "",
            "the first message of the sandbox cannot be understood: 'go'",
        ),
        ("sys.exit('no place')", "", "the sandbox has ended: no place"),
        (BEGIN, "channel.send(b'ended 0')", "the sandbox sent an invalid answer: 'ended 0'"),
        (
            BEGIN,
            "channel.send(b'ended x exit')",
            "the sandbox sent an invalid answer: 'ended x exit'",
        ),
        (
            BEGIN,
            "channel.send(b'ended 0 well')",
            "the sandbox sent an invalid answer: 'ended 0 well'",
        ),
        (BEGIN, "channel.send(b'x' * 100000)", "the sandbox sent an invalid answer: 'xxx"),
        (BEGIN, "socket.send_fds(channel, [b'ended 0 exit'], [folder] * 9)", None),
        (BEGIN, "sys.exit(1)", "the sandbox has ended"),
    ],
)
def test_what_the_porter_says_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: str, answer: str, told: str | None
) -> None:
    fake = tmp_path / "porter.py"
    fake.write_text(FAKE.format(begin=begin, answer=answer), encoding="utf-8")
    monkeypatch.setattr(porter_module, "__file__", str(fake))
    try:
        assert sandboxes.run("true").status == 0
    except SandboxError as error:
        assert told is not None and str(error).startswith(told) and len(str(error)) < 200
    else:
        assert told is None


@pytest.mark.usefixtures("maker")
def test_a_porter_that_does_not_answer_is_ended_with_its_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "porter.py"
    fake.write_text(FAKE.format(begin=BEGIN, answer="import time; time.sleep(1000)"), encoding="utf-8")
    monkeypatch.setattr(porter_module, "__file__", str(fake))
    monkeypatch.setattr("sf_core.agents.sandbox.sandbox.KILL_S", 0.1)
    assert sandboxes.run("true", timeout_s=0.1) == Ended(-9, "time", "")


@pytest.fixture
def no_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    why_no_sandbox.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    yield tmp_path
    why_no_sandbox.cache_clear()


def test_without_bubblewrap_a_sandbox_is_refused(no_programs: Path) -> None:
    told = "bubblewrap is not installed on this host (Debian package: bubblewrap)"
    assert why_no_sandbox() == told
    with pytest.raises(SandboxError, match=r"^bubblewrap is not installed on this host"):
        sandboxes.run("true")
    command = Command(command=("/bin/sh",), sandbox=SandboxLimits())
    with pytest.raises(ValueError, match=r"^sandbox: bubblewrap is not installed on this host"):
        CommandAgent(command)


def test_where_namespaces_cannot_be_made_a_sandbox_is_refused(no_programs: Path) -> None:
    (no_programs / "bwrap").write_text(
        "#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2; exit 1\n", encoding="utf-8"
    )
    (no_programs / "bwrap").chmod(0o755)
    reason = why_no_sandbox() or ""
    assert reason.startswith(
        "a sandbox cannot be created here (bwrap: No permissions to create a new namespace): this"
    )


async def test_the_documented_reward_runs_the_tests_of_an_answer() -> None:
    page = (ROOT / "docs" / "guides" / "agents" / "sandbox.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {"Task": Task}
    exec(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0], names)
    tests = "from solution import double\ndef test_double():\n    assert double(21) == 42\n"
    task = Task("t", "programs", "Double it.", metadata={"tests": tests})
    answers = ("def double(x): return 2 * x", "def double(x): return x")
    assert [await names["reward"](task, answer) for answer in answers] == [1.0, 0.0]


@pytest.mark.usefixtures("maker")
def test_paths_of_the_host_are_seen_read_only(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("seen\n", encoding="utf-8")
    # only its owner may read it, and inside is somebody else where that is root
    tmp_path.chmod(0o755)
    script = f"cat {tmp_path}/data; touch {tmp_path}/more 2>/dev/null || echo closed"
    assert sandboxes.shell(script, limits=SandboxLimits(paths=(str(tmp_path),))).output == "seen\nclosed\n"


@pytest.mark.parametrize("path", ["/", "relative", "/tmp", "/proc", "/sandbox/a", "/opt/../etc", "/dev"])
def test_a_place_of_the_sandboxs_own_cannot_be_replaced(path: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=r"name another folder|expected the absolute path"):
        SandboxLimits(paths=(path,))
