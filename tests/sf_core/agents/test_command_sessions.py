"""Sessions of a data plane whose agent is a command, from the claim to the rows."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from sf_core.agents.command import CommandAgent
from sf_core.config.programs import Command
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.types import Task
from tests import bench
from tests.bench import runners
from tests.bench.dataplane import planes

ROOT = Path(__file__).parents[3]

ASK_BY_ALL = """
import os, sys, anthropic, openai
from google import genai
question = [{"role": "user", "content": sys.stdin.read()}]
with openai.OpenAI() as client:
    reply = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=question)
with anthropic.Anthropic() as client:
    message = client.messages.create(model=os.environ["ANTHROPIC_MODEL"], messages=question, max_tokens=20)
with genai.Client() as client:
    words = question[0]["content"]
    content = client.models.generate_content(model=os.environ["GEMINI_MODEL"], contents=words)
print(reply.choices[0].message.content, message.content[0].text, content.text)
"""


def python(script: str, **settings: Any) -> Any:
    return CommandAgent(Command(command=(sys.executable, "-c", script), **settings)).run


def test_the_public_clients_find_the_endpoint_in_the_variables(
    plane_process: planes.ServedPlane,
    renderer: Renderer,
) -> None:
    plane_process.register(key="key-of-the-run", group_size=1, groups_per_batch=1, num_batches=1)
    plane_process.connect(lambda prompt, seed: planes.say(renderer, "42"))
    answers: list[str] = []

    def reward(task: Task, answer: str) -> float:
        answers.append(answer)
        return 1.0

    runners.run_until_ready(
        plane_process, runners.make_runner(plane_process.url, agent=python(ASK_BY_ALL), reward=reward)
    )
    assert answers == ["42 42 42\n"]
    # what it wrote is in the first branch
    assert [row.output for row in bench.command_agents.rows_of(plane_process)] == ["42 42 42\n", None, None]


def test_the_documented_script_is_an_agent(
    plane_process: planes.ServedPlane,
    renderer: Renderer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page = (ROOT / "docs" / "guides" / "agents" / "command.md").read_text(encoding="utf-8")
    setting = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)[0]
    script = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    command = Command.model_validate(yaml.safe_load(setting)["environment"]["agent"])
    program = tmp_path / command.command[0]
    program.write_text(script, encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    plane_process.register(group_size=1, groups_per_batch=1, num_batches=1)
    plane_process.connect(lambda prompt, seed: planes.say(renderer, "42"))

    def reward(task: Task, answer: str) -> float:
        return float(answer == "42\n")

    runners.run_until_ready(
        plane_process, runners.make_runner(plane_process.url, agent=CommandAgent(command).run, reward=reward)
    )
    [row] = bench.command_agents.rows_of(plane_process)
    assert row.reward == 1.0
    assert row.output is not None and re.fullmatch(r"tokens: \d+", row.output.replace("42\n", "").strip())


def test_a_command_that_fails_after_an_answer_keeps_what_it_wrote(
    plane_process: planes.ServedPlane,
    renderer: Renderer,
) -> None:
    rules = {"on_failure": {"agent_error": "zero"}, "failed_reward": -1.0}
    plane_process.register(group_size=2, groups_per_batch=1, num_batches=1, **rules)
    plane_process.connect(lambda prompt, seed: planes.say(renderer, "42"))
    agents = iter(
        [python(bench.stacks.echo_package.ASK + "sys.exit(3)"), python(bench.stacks.echo_package.ASK)]
    )

    async def agent(task: Any, endpoint: Any) -> Any:
        return await next(agents)(task, endpoint)

    runners.run_until_ready(plane_process, runners.make_runner(plane_process.url, agent=agent))
    [row] = [row for row in bench.command_agents.rows_of(plane_process) if row.status != "finished"]
    assert (row.status, row.reward) == ("agent_error", -1.0)
    assert row.output is not None and sorted(row.output.splitlines()) == ["42", "asked"]


def test_a_command_that_runs_too_long_fails_for_that_reason(
    plane_process: planes.ServedPlane,
    renderer: Renderer,
) -> None:
    plane_process.register(group_size=1, groups_per_batch=1, num_batches=1, session_attempts=2)
    plane_process.connect(lambda prompt, seed: planes.say(renderer, "42"))
    slow = python("import time; time.sleep(1000)", timeout_s=0.2)
    asking = python(bench.stacks.echo_package.ASK)
    agents = iter([slow, asking])

    async def agent(task: Any, endpoint: Any) -> Any:
        return await next(agents)(task, endpoint)

    runners.run_until_ready(plane_process, runners.make_runner(plane_process.url, agent=agent))
    counters = plane_process.get("/runs/run")["counters"]
    assert {name: number for name, number in counters.items() if name.startswith("failures.")} == {
        "failures.timeout": 1
    }
    [row] = bench.command_agents.rows_of(plane_process)
    assert row.status == "finished"


def test_the_output_of_an_answer_that_is_scored_elsewhere_waits_for_its_reward(
    plane_process: planes.ServedPlane,
    renderer: Renderer,
) -> None:
    plane_process.register(group_size=1, groups_per_batch=1, num_batches=1)
    plane_process.connect(lambda prompt, seed: planes.say(renderer, "42"))
    # a runner that scores is there
    plane_process.post("/runs/run/claim", {"runner": "w0", "max": 0, "work": "reward"})
    [claim] = plane_process.claim()
    path = f"/sessions/{claim['session_id']}/v1/chat/completions"
    body = {"model": "policy", "messages": [{"role": "user", "content": "6 * 7?"}]}
    plane_process.post(path, body, claim["key"])
    told = {"session_id": claim["session_id"], "status": "answered", "answer": '"42"'}
    plane_process.post("/runs/run/finished", {"sessions": [{**told, "output": "what it wrote"}]})
    [given] = plane_process.post("/runs/run/claim", {"runner": "w0", "max": 1, "work": "reward"})["sessions"]
    report = {"session_id": given["session_id"], "status": "finished", "reward": 1.0}
    plane_process.post("/runs/run/finished", {"sessions": [report]})
    [row] = bench.command_agents.rows_of(plane_process)
    assert row.output == "what it wrote"
