"""A command as agent in a sandbox."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from sf_core.agents.command import CommandAgent, CommandEnd, CommandError
from sf_core.agents.command_output import MAX_ANSWER
from sf_core.config.programs import Command
from sf_core.dataplane.chat.renderer import Renderer
from tests import bench
from tests.bench import command_agents
from tests.bench.dataplane import planes


def agent(*words: str, **settings: Any) -> Any:
    return CommandAgent(Command.model_validate({"command": words, "sandbox": {}} | settings)).run


async def shell(script: str, **settings: Any) -> CommandEnd:
    working = agent("sh", "-c", script, **settings)(command_agents.TASK, command_agents.ENDPOINT)
    ended: CommandEnd = await asyncio.wait_for(working, bench.waits.patience())
    return ended


async def failure(script: str, **settings: Any) -> CommandError:
    with pytest.raises(CommandError) as failed:
        await shell(script, **settings)
    return failed.value


async def test_it_is_given_its_task_as_outside() -> None:
    ended = await shell(
        'cat; echo; cat task.json; echo; ls -A . ~; echo "$PWD $MINE"; echo x >&2', variables={"MINE": "1"}
    )
    prompt, _, rest = ended.answer.partition("\n{")
    facts, _, places = rest.partition("\n}\n")
    assert prompt == command_agents.TASK.prompt
    assert json.loads("{" + facts + "}")["task_id"] == command_agents.TASK.task_id
    assert places == ".:\ntask.json\n\n/tmp/home:\n/sandbox 1\n"
    assert ended.output.replace("x\n", "") == ended.answer


async def test_neither_variables_nor_files_of_the_worker_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED", "1")
    assert "PLANTED" not in (await shell("env")).answer
    assert str(await failure(f"cat {__file__}")).endswith(f"cat: {__file__}: No such file or directory")


async def test_its_answer_is_a_file_or_the_folder() -> None:
    script = "mkdir out; echo 42 > out/a; ln -s /etc/passwd link; mkfifo pipe; echo x > ~/state"
    assert (await shell(script, answer="file:out/a")).answer == "42\n"
    assert (await shell(script, answer="folder")).answer == {"out/a": "42\n"}


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("exit 3", "the command exited with status 3"),
        ("kill -9 $$", "the command was killed by signal 9"),
        ("true", "the command exited with status 0, but the file a does not exist in the command's folder"),
        (
            "mkfifo a",
            "the command exited with status 0, but the file a does not exist in the command's folder",
        ),
        (
            "ln -s /etc/passwd a",
            "the command exited with status 0, but a leads to a place outside the command's folder",
        ),
        (
            "ln -s ../proc/1/environ a",
            "the command exited with status 0, but a leads to a place outside the command's folder",
        ),
        (f"head -c {MAX_ANSWER + 1} /dev/zero > a", "a is larger than the limit of 1048576 bytes"),
        ("yes", "the output of the command exceeds output_mb (1)"),
        (
            "head -c 90000000 /dev/zero > a; sleep 1000",
            "the memory use of the command exceeds memory_mb (64)",
        ),
    ],
)
async def test_a_failure_is_told_as_outside(script: str, reason: str) -> None:
    limits = {"memory_mb": 64, "output_mb": 1}
    failed = await failure(f"echo so it is >&2; {script}", answer="file:a", sandbox=limits)
    assert str(failed).startswith("the command gave no answer: ") and reason in str(failed)
    assert str(failed).endswith("; the command's standard error ends with: so it is")
    assert failed.cause == "agent" and failed.output.startswith("so it is\n")


async def test_the_time_ends_it() -> None:
    failed = await failure("echo started; sleep 1000", timeout_s=1.0)
    assert str(failed) == "the command ran longer than its timeout_s of 1 s"
    assert (failed.cause, failed.output) == ("time", "started\n")


async def test_a_program_of_the_host_is_seen_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "my-agent"
    beside = tmp_path / "beside"
    program.write_text(f"#!/bin/sh\ncat {beside}\n", encoding="utf-8")
    program.chmod(0o755)
    beside.write_text("seen\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    working = agent("./my-agent", sandbox={"paths": [str(beside)]})(
        command_agents.TASK, command_agents.ENDPOINT
    )
    assert (await working).answer == "seen\n"
    with pytest.raises(CommandError, match="No such file or directory"):
        await agent("./my-agent")(command_agents.TASK, command_agents.ENDPOINT)


async def test_a_program_that_is_gone_fails_its_session(tmp_path: Path) -> None:
    program = tmp_path / "agent"
    program.write_text("#!/no/such/interpreter\n", encoding="utf-8")
    program.chmod(0o755)
    with pytest.raises(
        CommandError, match=r"gave no answer: error in the sandbox: .* cannot be started: No such file"
    ):
        await agent(str(program))(command_agents.TASK, command_agents.ENDPOINT)


def test_it_reaches_the_endpoint(plane_process: planes.ServedPlane, renderer: Renderer) -> None:
    plane_process.register(key="key-of-the-run", group_size=1, groups_per_batch=1, num_batches=1)
    plane_process.connect(lambda prompt, seed: planes.say(renderer, "42"))
    command = agent(sys.executable, "-c", bench.stacks.echo_package.ASK)
    bench.runners.run_until_ready(
        plane_process,
        bench.runners.make_runner(plane_process.url, agent=command, reward=lambda task, answer: len(answer)),
    )
    [row] = command_agents.rows_of(plane_process)
    assert (row.reward, sorted(row.output.splitlines())) == (3.0, ["42", "asked"])


EARN = """
import os, urllib.error, urllib.request
from urllib.parse import urlsplit
url = urlsplit(os.environ["OPENAI_BASE_URL"])
key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
session = url.path.removesuffix("/v1")
for path in (session + "/reward", session + "/finish", session, "/runs/run", "/v1/models", "/sessions", "/"):
    try:
        urllib.request.urlopen(urllib.request.Request(f"http://{url.netloc}{path}", b'{"reward": 9}', key))
    except urllib.error.HTTPError as error:
        print(error.code)
print(urllib.request.urlopen(urllib.request.Request(f"{url.geturl()}/models", headers=key)).status)
"""


async def test_of_the_data_plane_it_reaches_its_own_turns_only(
    plane_process: planes.ServedPlane, renderer: Renderer
) -> None:
    plane_process.register(key="key-of-the-run", group_size=1, groups_per_batch=1, num_batches=1)
    [claim] = plane_process.claim()
    url = f"{plane_process.url}/sessions/{claim['session_id']}/v1"
    endpoint = type(command_agents.ENDPOINT)(url, claim["key"], "policy")
    ended = await agent(sys.executable, "-c", EARN)(command_agents.TASK, endpoint)
    assert ended.answer.split() == ["403"] * 7 + ["200"]
