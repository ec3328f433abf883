"""What a rehearsal tells of agents and rewards: what no answer of the policy changes is refused, and the rest
is only told."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sf_core.agents.runner import first_index
from sf_core.cli.rehearsal import session
from sf_core.cli.rehearsal.session import Result, rehearse
from sf_core.config import RunConfig
from sf_core.config.yaml_file import load_config

MODULE = """
import asyncio
import json
import re
import sys
import time
from sf_core.types import NotJudged, Task

def tasks(split, index):
    return Task(f"add-{split}-{index}", "addition", f"What is {index}+3?", answer=str(index + 3))

async def ask(task, endpoint):
    client = endpoint.client()
    messages = [{"role": "user", "content": task.prompt}]
    reply = await client.chat.completions.create(model=endpoint.model, messages=messages)
    return reply.choices[0].message.content

class Own:
    pass

# no answer changes what these do

async def raises(task, endpoint):
    raise KeyError(task.task_id)

async def exits(task, endpoint):
    sys.exit(3)

async def not_awaited(task, endpoint):
    return endpoint.client().chat.completions.create(model="policy", messages=[]).choices

def lacks_await(task, endpoint):
    return ask(task, endpoint)

async def never_asks(task, endpoint):
    return task.answer

async def refused(task, endpoint):
    return await endpoint.client().chat.completions.create(model=endpoint.model, messages=[])

async def own_address(task, endpoint):
    import urllib.request
    urllib.request.urlopen("http://127.0.0.1:9/v1")

async def lacks_import(task, endpoint):
    return jsn.loads(await ask(task, endpoint))

async def wrong_module(task, endpoint):
    return json.loadz(await ask(task, endpoint))

async def wrong_field(task, endpoint):
    await ask(task, endpoint)
    return task.solution

async def lacks_package(task, endpoint):
    await ask(task, endpoint)
    import no_such_package.inner

async def returns_nothing(task, endpoint):
    await ask(task, endpoint)

# another answer may do better

async def cannot_parse(task, endpoint):
    return json.loads("{" + await ask(task, endpoint))

async def cannot_find(task, endpoint):
    return re.search("<answer>(.*)</answer>", await ask(task, endpoint)).group(1)

async def cannot_index(task, endpoint):
    return json.loads(await ask(task, endpoint))["answer"]

async def not_bound(task, endpoint):
    for word in re.findall("<word>", await ask(task, endpoint)):
        found = word
    return found

async def runs_answer(task, endpoint):
    exec("x" + await ask(task, endpoint))

async def evaluates_answer(task, endpoint):
    return eval(await ask(task, endpoint) + " what")

async def calls_named(task, endpoint):
    return getattr(json, "n" + await ask(task, endpoint))

async def imports_named(task, endpoint):
    return __import__("m" + await ask(task, endpoint))

async def lacks_attribute(task, endpoint):
    await ask(task, endpoint)
    return Own().answer

async def asks_on(task, endpoint):
    while True:
        await ask(task, endpoint)

async def gives_up(task, endpoint):
    return None if await ask(task, endpoint) else "found"

async def times_out(task, endpoint):
    raise TimeoutError("a service is slow")

async def fails_on_one(task, endpoint):
    if task.task_id == "add-train-FIRST":
        raise KeyError("once")
    return await ask(task, endpoint)

async def fails_differently(task, endpoint):
    raise (KeyError if task.task_id == "add-train-FIRST" else ValueError)("?")

async def waits(task, endpoint):
    await asyncio.sleep(60)

# rewards

def reward(task, answer):
    return float(answer == task.answer)

def zero(task, answer):
    return 0.0

def strips(task, answer):
    return float(answer.strip() == task.answer)

def any_answer(task, answer):
    return 0.5

def lacks_return(task, answer):
    float(answer == task.answer)

def wrong_name(task, answer):
    return scor(answer)

def gives_none(task, answer):
    return None if answer else 1.0

def cannot_score(task, answer):
    return float("x" + answer)

def not_now(task, answer):
    raise NotJudged("later")
""".replace("FIRST", str(first_index(0)))


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "rehearsed.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield
    sys.modules.pop("rehearsed", None)


async def rehearsed(*sets: str, **functions: str) -> Result:
    named = {"tasks": "tasks", "agent": "ask", "reward": "reward"} | functions
    given = [f"environment.{part}=rehearsed:{name}" for part, name in named.items()]
    return await rehearse(configured(*given, *sets))


def configured(*sets: str) -> RunConfig:
    return load_config("quickstart", ["run_id=r", "seed=0", *sets])


@pytest.mark.usefixtures("module")
async def test_an_agent_that_works_is_not_told_of() -> None:
    assert await rehearsed() == Result()
    for reward in ("zero", "any_answer"):
        assert await rehearsed(reward=reward) == Result()


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("agent", "told"),
    [
        ("raises", "KeyError: 'add-train-0'"),
        ("exits", "SystemExit: 3"),
        ("not_awaited", "AttributeError: 'coroutine' object has no attribute 'choices'"),
        ("lacks_await", "returned a coroutine: define the function with `async def`"),
        ("never_asks", "the agent got no answer from the policy, and a session without an answer cannot"),
        ("refused", "messages must contain at least one message"),
        ("own_address", "URLError: <urlopen error [Errno 111] Connection refused>"),
        ("lacks_import", "NameError: name 'jsn' is not defined"),
        ("wrong_module", "AttributeError: module 'json' has no attribute 'loadz'"),
        ("wrong_field", "AttributeError: 'Task' object has no attribute 'solution'"),
        ("lacks_package", "ModuleNotFoundError: No module named 'no_such_package'"),
    ],
)
@pytest.mark.filterwarnings("ignore:coroutine")
async def test_what_no_answer_changes_is_refused_with_its_place(agent: str, told: str) -> None:
    result = await rehearsed(agent=agent)
    assert result.note == ""
    assert result.refusal.startswith("the agent failed") and "rehearsed.py:" in result.refusal
    assert told in result.refusal


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("agent", "told"),
    [
        ("cannot_parse", "JSONDecodeError: "),
        ("cannot_find", "AttributeError: 'NoneType' object has no attribute 'group'"),
        ("cannot_index", "TypeError: 'int' object is not subscriptable"),
        ("not_bound", "UnboundLocalError: "),
        ("runs_answer", "NameError: name 'x3' is not defined"),
        ("evaluates_answer", "SyntaxError: invalid syntax"),
        ("calls_named", "AttributeError: module 'json' has no attribute 'n3'"),
        ("imports_named", "ModuleNotFoundError: No module named 'm3'"),
        ("lacks_attribute", "AttributeError: 'Own' object has no attribute 'answer'"),
        ("asks_on", "The scripted policy gives 64 answers per session."),
        ("times_out", "TimeoutError: a service is slow"),
    ],
)
async def test_what_another_answer_may_change_is_only_told(agent: str, told: str) -> None:
    result = await rehearsed(agent=agent)
    assert result.refusal == ""
    assert result.note.startswith("with a scripted answer, the agent failed at rehearsed.py:")
    assert told in result.note and result.note.endswith("; answers of the policy may do better")


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize("agent", ["fails_on_one", "fails_differently"])
async def test_what_fails_for_one_task_is_only_told(agent: str) -> None:
    result = await rehearsed(agent=agent)
    assert result.refusal == ""
    assert result.note.startswith("on one of two tasks, the agent failed at rehearsed.py:")


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("agent", "reward", "told"),
    [
        ("ask", "lacks_return", "lacks_return (rehearsed.py:"),
        ("ask", "wrong_name", "NameError: name 'scor' is not defined"),
        ("returns_nothing", "strips", "returned None, for which the reward function rehearsed:strips"),
    ],
)
async def test_a_reward_that_must_fail_is_refused(agent: str, reward: str, told: str) -> None:
    result = await rehearsed(agent=agent, reward=reward)
    assert result.refusal.startswith("the reward failed") and told in result.refusal
    assert result.note == ""


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("agent", "reward", "told"),
    [
        ("ask", "gives_none", "returned None, which is not a finite number"),
        ("ask", "cannot_score", "ValueError: could not convert string to float"),
        ("gives_up", "strips", "returned None, for which the reward function rehearsed:strips"),
    ],
)
async def test_a_reward_that_fails_for_this_answer_is_only_told(agent: str, reward: str, told: str) -> None:
    result = await rehearsed(agent=agent, reward=reward)
    assert result.refusal == ""
    assert result.note.startswith("with a scripted answer, the reward failed") and told in result.note


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize("agent", ["returns_nothing", "gives_up"])
async def test_an_agent_without_an_answer_is_named_where_its_reward_needs_none(agent: str) -> None:
    result = await rehearsed(agent=agent, reward="any_answer")
    assert result.refusal == ""
    assert result.note.startswith(f"the agent rehearsed:{agent} (rehearsed.py:")
    assert result.note.endswith(
        " returned None: if the reward function needs an answer, the agent lacks a `return`"
    )


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize("functions", [{"agent": "waits"}, {"reward": "not_now"}])
async def test_what_has_not_ended_in_time_is_only_told(
    monkeypatch: pytest.MonkeyPatch, functions: dict[str, str]
) -> None:
    monkeypatch.setattr(session, "DEADLINE_S", 0.3)
    note = "the task that was tried before the start had not ended after 0.3 s"
    assert await rehearsed(**functions) == Result(note=note)


@pytest.mark.usefixtures("module")
async def test_answers_are_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = "environment.judges={quality: {url: 'http://127.0.0.1:9/v1'}}"
    assert await rehearsed(judge, reward="wrong_name") == Result()


@pytest.mark.usefixtures("module")
async def test_every_part_of_a_mixture_is_tried() -> None:
    parts = ", ".join(
        f"{name}: {{tasks: rehearsed:tasks, agent: rehearsed:{agent}, reward: rehearsed:reward}}"
        for name, agent in (("good", "ask"), ("bad", "raises"))
    )
    mixed = ("environment={name: mixture}", f"environment.settings.parts={{{parts}}}")
    assert (await rehearse(configured(*mixed))).refusal.startswith("the agent failed at rehearsed.py:")
    only_good = "rollout.curriculum={stages: [{shares: {good: 1}}]}"
    assert await rehearse(configured(*mixed, only_good)) == Result()


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("script", "refused"),
    [
        (
            "import sys; sys.exit('no licence')",
            "the agent failed: the command gave no answer: the command exited with status 1",
        ),
        ("print('3')", "the agent got no answer from the policy"),
    ],
)
async def test_a_command_is_tried_too(script: str, refused: str) -> None:
    Path("agent_command.py").write_text(script, encoding="utf-8")
    command = f"{{command: [{sys.executable}, {Path.cwd()}/agent_command.py]}}"
    given = ("tasks=rehearsed:tasks", "reward=rehearsed:reward", f"agent={command}")
    result = await rehearse(configured(*(f"environment.{one}" for one in given)))
    assert refused in result.refusal


@pytest.mark.parametrize("environment", ["quickstart", "instructions", "screen"])
async def test_the_agents_of_our_environments_work_with_a_scripted_answer(environment: str) -> None:
    assert await rehearse(configured(f"environment={{name: {environment}}}")) == Result()
