"""A command as agent: real processes, what they are given, what becomes of what they leave."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sf_core.agents.command import CommandAgent, CommandEnd, CommandError
from sf_core.agents.command_output import MAX_ANSWER, MAX_OUTPUT, Transcript
from sf_core.config.programs import Command
from sf_core.process.child_processes import MARK, end_marked
from sf_core.types import Task
from tests.bench import command_agents, waits

GRACE_S = 0.1
"""Nothing here has anything to do between SIGTERM and SIGKILL."""


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where folders of commands are; none is left after a test."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


async def run(*words: str, task: Task = command_agents.TASK, **settings: Any) -> CommandEnd:
    agent = CommandAgent(Command(command=words, **settings), GRACE_S).run
    return await asyncio.wait_for(agent(task, command_agents.ENDPOINT), waits.patience())


async def shell(script: str, **settings: Any) -> CommandEnd:
    return await run("sh", "-c", script, **settings)


async def failure(script: str, **settings: Any) -> CommandError:
    with pytest.raises(CommandError) as failed:
        await shell(script, **settings)
    return failed.value


async def test_the_task_comes_on_standard_input_and_as_a_file_without_its_answer() -> None:
    assert (await shell("cat")).answer == command_agents.TASK.prompt
    told = (await shell("cat task.json")).answer
    facts = {
        "task_id": "t-1",
        "environment": "sums",
        "prompt": command_agents.TASK.prompt,
        "metadata": {"level": 3},
    }
    assert json.loads(told) == facts
    assert "forty-two" not in told


async def test_what_was_prepared_is_in_its_folder_and_in_its_answer_if_it_was_changed() -> None:
    agent = CommandAgent(Command(command=("sh", "-c", "cat a; echo more >> b/c"), answer="folder")).run
    end = await agent(command_agents.TASK, command_agents.ENDPOINT, {"a": "one\n", "b/c": b"two\n"})
    assert (end.output, end.answer) == ("one\n", {"b/c": "two\nmore\n"})


@pytest.mark.parametrize(
    ("prepared", "reason"),
    [
        (["a"], "to texts or bytes, not list"),
        ({"../a": "x"}, "to texts or bytes: '../a' is not the name of a file in this folder"),
        ({"/a": "x"}, "to texts or bytes: '/a' is not the name of a file in this folder"),
    ],
)
async def test_what_is_no_files_is_not_prepared_for_a_command(prepared: Any, reason: str) -> None:
    agent = CommandAgent(Command(command=("true",))).run
    sentence = (
        "environment.prepare must return a mapping from names of files in the command's folder " + reason
    )
    with pytest.raises((TypeError, ValueError), match=re.escape(sentence)):
        await agent(command_agents.TASK, command_agents.ENDPOINT, prepared)


async def test_a_task_that_is_no_json_fails_its_session() -> None:
    strange = Task("t", "e", "p", metadata={"at": object()})
    with pytest.raises(CommandError, match=r"gave no answer: the task cannot be written as JSON \(Type is"):
        await run("cat", task=strange)


PRINT_VARIABLES = "import json, os; print(json.dumps(dict(os.environ)))"


async def test_home_temporary_files_and_the_working_folder_are_its_own(scratch: Path) -> None:
    variables = json.loads((await run(sys.executable, "-c", PRINT_VARIABLES)).answer)
    places = [Path(variables[name]) for name in ("HOME", "TMPDIR", "PWD")]
    assert len({*places}) == 3
    assert len({place.parent for place in places}) == 1 and places[0].parent.parent == scratch
    assert (await shell('cd "$HOME" && pwd -P && cd "$TMPDIR" && ls')).answer.startswith(
        str(scratch.resolve())
    )
    assert (await shell("pwd -P; ls")).answer.split()[1:] == ["task.json"]


async def test_neither_our_settings_nor_keys_nor_the_users_endpoints_are_inherited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    withheld = (
        *("SF_DATAPLANE_KEY", "SF_RUN_KEY", "PREFECT_API_AUTH_STRING", "AWS_PROFILE", "GITHUB_TOKEN"),
        *("SSH_AUTH_SOCK", "SERVICE_ACCESS_KEY_ID", "db_password", "PYTHONPATH", "OPENAI_ORG_ID"),
        *("ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_CUSTOM_HEADERS", "XDG_CONFIG_HOME"),
    )
    given = {"SF_STACK": "/planted", "TOKENIZERS_PARALLELISM": "true", "PLANTED": "1"}
    users = {"OPENAI_API_KEY": "the user's", "ANTHROPIC_MODEL": "another"}
    for name, value in (dict.fromkeys(withheld, "/planted") | given | users).items():
        monkeypatch.setenv(name, value)
    found = json.loads((await run(sys.executable, "-c", PRINT_VARIABLES, variables={"MINE": "2"})).answer)
    assert [name for name in withheld if name in found] == []
    assert {name: found.get(name) for name in given} == given
    assert (found["MINE"], found["PATH"]) == ("2", os.environ["PATH"])
    assert (found["OPENAI_API_KEY"], found["ANTHROPIC_MODEL"]) == ("key-of-the-run", "policy")


async def test_a_program_is_found_on_the_path_or_from_the_folder_of_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "my-agent"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho found $1\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    assert (await run("bin/my-agent", "a b")).answer == "found a b\n"
    assert (await run("my-agent", "x", variables={"PATH": f"{program.parent}:{os.environ['PATH']}"})).answer
    program.chmod(0o644)
    for name in ("bin/my-agent", "no-such-agent"):
        with pytest.raises(ValueError, match=f"^the program '{name}' does not exist on this host"):
            CommandAgent(Command(command=(name,)))


async def test_a_program_that_is_gone_fails_its_session(tmp_path: Path) -> None:
    program = tmp_path / "agent"
    program.write_text("#!/bin/sh\n", encoding="utf-8")
    program.chmod(0o755)
    agent = CommandAgent(Command(command=(str(program),))).run
    program.unlink()
    with pytest.raises(
        CommandError, match=r"gave no answer: the agent's command cannot be started: .* No such file"
    ):
        await asyncio.wait_for(agent(command_agents.TASK, command_agents.ENDPOINT), waits.patience())


async def test_the_answer_is_what_it_prints_and_the_output_what_it_wrote() -> None:
    ended = await shell("echo thinking >&2; echo 42")
    assert ended.answer == "42\n"
    assert sorted(ended.output.splitlines()) == ["42", "thinking"]


async def test_the_answer_is_a_file() -> None:
    ended = await shell("mkdir out; echo 42 > out/answer.txt; echo log", answer="file:out/answer.txt")
    assert ended == CommandEnd("42\n", "log\n")


async def test_the_answer_is_what_is_new_in_the_folder() -> None:
    script = (
        "mkdir -p a/b; echo one > a/b/one; echo > empty; printf '\\377' > raw; ln -s /etc/passwd link; "
        'ln -s /etc folder; mkfifo pipe; echo home > "$HOME/state"; echo "$TMPDIR" > "$TMPDIR/other"'
    )
    files = {"a/b/one": "one\n", "empty": "\n", "raw": {"base64": "/w=="}}
    assert (await shell(script, answer="folder")).answer == files
    assert (await shell("echo 1 >> task.json", answer="folder")).answer.keys() == {"task.json"}


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("true", "the file a does not exist in the command's folder"),
        ("mkdir a", "the file a does not exist in the command's folder"),
        ("mkfifo a", "the file a does not exist in the command's folder"),
        ("ln -s /etc/passwd a", "a leads to a place outside the command's folder"),
        ("ln -s ../home/x a", "a leads to a place outside the command's folder"),
        ("ln -s a a", "the file a does not exist in the command's folder"),
        ("printf 'ab\\377' > a", "a is not valid UTF-8: invalid start byte at byte 2"),
        (f"head -c {MAX_ANSWER + 1} /dev/zero > a", f"a is larger than the limit of {MAX_ANSWER} bytes"),
    ],
)
async def test_a_file_that_is_no_answer_fails_the_session(script: str, reason: str) -> None:
    failed = await failure(f"{script}; echo so it is >&2", answer="file:a")
    told = f"the command exited with status 0, but {reason}; the command's standard error ends with: so it is"
    assert str(failed) == f"the command gave no answer: {told}"
    assert (failed.cause, failed.output) == ("agent", "so it is\n")


async def test_an_answer_in_a_folder_that_leads_elsewhere_is_refused() -> None:
    assert "d/passwd leads to a place outside" in str(await failure("ln -s /etc d", answer="file:d/passwd"))


@pytest.mark.parametrize(
    ("script", "answer", "reason"),
    [
        ("printf '\\377'", "output", "the printed text is not valid UTF-8: invalid start byte at byte 0"),
        (f"head -c {MAX_ANSWER + 1} /dev/zero", "output", "the printed text is larger than the limit of"),
        (
            f"head -c {MAX_ANSWER} /dev/zero > a",
            "folder",
            "the command's folder is over the limit of 1048576 bytes",
        ),
    ],
)
async def test_other_answers_are_text_of_bounded_size(script: str, answer: str, reason: str) -> None:
    assert reason in str(await failure(script, answer=answer))


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("exit 3", "the command exited with status 3"),
        ("kill -9 $$", "the command was killed by signal 9"),
        ("for n in 1 2 3 4 5 6 7; do echo $n >&2; done; exit 1", "3\n4\n5\n6\n7"),
    ],
)
async def test_an_exit_status_fails_the_session_and_is_told_with_the_last_lines(
    script: str, told: str
) -> None:
    failed = await failure(script)
    assert str(failed).endswith(told) and failed.cause == "agent"


async def test_what_it_wrote_is_bounded_and_its_beginning_and_end_are_kept() -> None:
    ended = await shell(
        f"echo first; head -c {4 * MAX_OUTPUT} /dev/zero | tr '\\0' x; echo last", answer="folder"
    )
    assert ended.output.startswith("first\nxxx") and ended.output.endswith("xxxlast\n")
    assert f"\n... {3 * MAX_OUTPUT + len('first last ')} bytes left out ...\n" in ended.output
    assert len(ended.output) < MAX_OUTPUT + 100


def test_a_transcript_keeps_everything_up_to_its_limit() -> None:
    whole = Transcript(8)
    cut = Transcript(8)
    for letter in "abcdefg\N{LATIN SMALL LETTER E WITH ACUTE}".encode():
        cut.add(bytes([letter]))
    whole.add("abc\N{LATIN SMALL LETTER E WITH ACUTE}fgh".encode())
    assert whole.text() == "abc\N{LATIN SMALL LETTER E WITH ACUTE}fgh"
    assert cut.text() == "abcd\n... 1 bytes left out ...\nfg\N{LATIN SMALL LETTER E WITH ACUTE}"


async def test_the_time_begins_when_it_runs_and_ends_it(tmp_path: Path) -> None:
    timeout_s = waits.patience(0.5)
    failed = await failure(f"echo started; echo $$ > {tmp_path}/pid; sleep 1000", timeout_s=timeout_s)
    assert str(failed) == f"the command ran longer than its timeout_s of {timeout_s:g} s"
    assert (failed.cause, failed.output) == ("time", "started\n")
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text(encoding="utf-8")))


# tells its number when neither SIGTERM, nor its group, nor its variables lead to it any more
DAEMON = (
    'env -i PATH="$PATH" setsid -f sh -c \'trap "" TERM; echo $$ > daemon; exec sleep 1000\' 2>&1 >/dev/null'
)
AWAIT_DAEMON = "while [ ! -s daemon ]; do sleep 0.01; done"


async def test_what_it_leaves_running_ends_with_it() -> None:
    ended = await shell(f"{DAEMON}; {AWAIT_DAEMON}; cat daemon")
    assert not psutil.pid_exists(int(ended.answer))


def family_of(pid_file: Path) -> list[psutil.Process]:
    """The command that wrote its number into this file, its keeper, and their children."""
    waits.wait_until(
        lambda: pid_file.exists() and pid_file.read_text(encoding="utf-8").endswith("\n"),
        "the command",
        every_s=0.01,
    )
    command = psutil.Process(int(pid_file.read_text(encoding="utf-8")))
    keeper = command.parent()
    return [keeper, *keeper.children(recursive=True)]


def check_gone(processes: list[psutil.Process], scratch: Path) -> None:
    assert len(processes) >= 3
    _, alive = psutil.wait_procs(processes, timeout=waits.patience())
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
    waits.wait_until(lambda: not any(scratch.iterdir()), "the folder to be removed", every_s=0.01)


def lasting(pid_file: Path) -> tuple[str, ...]:
    """A command that lasts, with a child and somebody who left it."""
    return "sh", "-c", f"{DAEMON}; {AWAIT_DAEMON}; {with_a_child(pid_file)}"


def with_a_child(pid_file: Path) -> str:
    """A script that lasts and, once its child is there, writes its number into this file."""
    return f"sleep 1000 & echo $$ > {pid_file}.new; mv {pid_file}.new {pid_file}; wait"


async def test_a_session_that_is_taken_back_leaves_nothing(tmp_path: Path, scratch: Path) -> None:
    pid_file = tmp_path / "pid"
    async with asyncio.timeout(waits.patience()):
        agent = CommandAgent(Command(command=lasting(pid_file)), GRACE_S).run
        working = asyncio.ensure_future(agent(command_agents.TASK, command_agents.ENDPOINT))
        processes = await asyncio.to_thread(family_of, pid_file)
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working
        # nothing is left to wait for
        assert not any(process.is_running() for process in processes)
        assert list(scratch.iterdir()) == []
    check_gone(processes, scratch)


STACK = "/stacks/test-command"

WORKER = """
import asyncio, sys, tempfile
from sf_core.agents.command import CommandAgent
from sf_core.config.programs import Command
from tests.bench.command_agents import ENDPOINT, TASK
tempfile.tempdir = sys.argv[1]
asyncio.run(CommandAgent(Command(command=tuple(sys.argv[3:])), float(sys.argv[2])).run(TASK, ENDPOINT))
"""


def end_its_stack(worker: subprocess.Popen[bytes]) -> None:
    assert end_marked(STACK)


@pytest.mark.parametrize("end", [subprocess.Popen.kill, subprocess.Popen.terminate, end_its_stack])
def test_a_worker_that_is_killed_leaves_nothing(
    tmp_path: Path, scratch: Path, end: Callable[[subprocess.Popen[bytes]], None]
) -> None:
    pid_file = tmp_path / "pid"
    command = [sys.executable, "-c", WORKER, str(scratch), str(GRACE_S), *lasting(pid_file)]
    worker = subprocess.Popen(command, env=os.environ | {MARK: STACK})
    try:
        processes = family_of(pid_file)
        end(worker)
        worker.wait(waits.patience())
        check_gone(processes, scratch)
    finally:
        worker.kill()


async def test_without_its_keeper_a_command_and_its_group_are_ended(tmp_path: Path, scratch: Path) -> None:
    pid_file = tmp_path / "pid"
    async with asyncio.timeout(waits.patience()):
        agent = CommandAgent(Command(command=("sh", "-c", with_a_child(pid_file))), GRACE_S).run
        working = asyncio.ensure_future(agent(command_agents.TASK, command_agents.ENDPOINT))
        keeper, *others = await asyncio.to_thread(family_of, pid_file)
        keeper.kill()
        with pytest.raises(
            CommandError, match=r"gave no answer: the process that supervises the agent's command was killed$"
        ):
            await working
        check_gone([keeper, *others], scratch)


async def test_commands_run_side_by_side(tmp_path: Path) -> None:
    """Each waits for all of them to have begun."""
    script = (
        f"echo > {tmp_path}/$(cat); while [ $(ls {tmp_path} | grep -c begun) -lt 8 ]; do sleep 0.01; done"
    )
    agent = CommandAgent(Command(command=("sh", "-c", script))).run
    tasks = [Task(f"t{n}", "e", f"begun-{n}") for n in range(8)]
    await asyncio.wait_for(
        asyncio.gather(*(agent(task, command_agents.ENDPOINT) for task in tasks)), waits.patience()
    )


async def test_a_command_may_close_its_output_and_go_on() -> None:
    assert (await shell("echo 42; exec >&- 2>&-; read line; exit 0")).answer == "42\n"


async def test_a_pipe_full_of_errors_holds_nobody_up() -> None:
    assert (await shell("head -c 1000000 /dev/zero >&2; echo 42")).answer == "42\n"


def test_it_works_outside_the_main_thread() -> None:
    """As workers of Dask run it."""
    code = (
        "import asyncio, threading\n"
        "from tests.sf_core.agents.test_command import shell\n"
        "thread = threading.Thread(target=lambda: print(asyncio.run(shell('echo 42')).answer, end=''))\n"
        "thread.start()\nthread.join()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=waits.patience(),
        encoding="utf-8",
    )
    assert (done.stdout, done.stderr) == ("42\n", "")
