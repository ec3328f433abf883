"""`sf try` with the built-in policy: what works, and what mistakes in the user's code look like."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from sf_core.agents import event_loop
from sf_core.cli.main import app
from sf_core.cli.serving.app_thread import serve_app
from sf_core.config.yaml_file import load_config
from sf_core.models.builtin import make_policy
from tests.bench.commands import sf
from tests.bench.judge_server import JudgeServer

MODULE = """
import itertools
import socket
import subprocess
import time
import urllib.request
import openai
from sf_core.types import Task

def tasks(split, index):
    return Task(f"add-{split}-{index}", "addition", f"What is {index}+3?", answer=str(index + 3))

numbers = itertools.count()

def ask(task, endpoint):
    with openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as client:
        messages = [{"role": "user", "content": task.prompt}]
        for _ in range(2):
            reply = client.chat.completions.create(model=endpoint.model, messages=messages)
            said = {"role": "assistant", "content": reply.choices[0].message.content}
            messages += [said, {"role": "user", "content": "Sure?"}]
    return messages[-2]["content"] or ""

async def ask_async(task, endpoint):
    async with endpoint.client() as client:
        messages = [{"role": "user", "content": task.prompt}]
        reply = await client.chat.completions.create(model=endpoint.model, messages=messages)
    return reply.choices[0].message.content or ""

async def name_error(task, endpoint):
    return json.loads(await ask_async(task, endpoint))

async def no_await(task, endpoint):
    async with endpoint.client() as client:
        return client.chat.completions.create(model=endpoint.model, messages=[]).choices

async def takes_one(task):
    return "3"

async def never_asks(task, endpoint):
    return task.answer

async def ends_without(task, endpoint):
    await ask_async(task, endpoint)

async def prints(task, endpoint):
    print("printed by the agent")
    subprocess.run(["echo", "printed by a program"])
    return await ask_async(task, endpoint)

async def odd(task, endpoint):
    await ask_async(task, endpoint)
    return {1: {"a set"}, "bad": "\\udc80"}

async def blocks(task, endpoint):
    time.sleep(60)

async def calls(task, endpoint):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        urllib.request.urlopen(f"http://127.0.0.1:{silent.getsockname()[1]}/search").read()

async def computes(task, endpoint):
    while True: sum(range(99))

async def own_address(task, endpoint):
    async with openai.AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="x", max_retries=0) as client:
        await client.chat.completions.create(model=endpoint.model, messages=[])

def reward(task, answer):
    return {"right": float(answer.strip() == task.answer), "there": 0.5}

def asks_judge(task, answer, judges):
    chosen = judges["quality"].choose(task.prompt + " Is it 42?", ["yes", "no"], item="right")
    return {"right": chosen["yes"]}

def any_answer(task, answer):
    return 0.25

def no_reward(task, answer):
    return None

def dictionary(split, index):
    return {"prompt": "?"}

def changing(split, index):
    return Task(f"add-{split}-{index}", "addition", str(next(numbers)))
"""

SMALL = "{hidden_size: 32, num_layers: 1, warmstart: null}"


@pytest.fixture
def trial_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "tried_module.py").write_text(MODULE, encoding="utf-8")
    named = {part: f"tried_module:{part}" for part in ("tasks", "reward")}
    names = ", ".join(f'{part}: "{name}"' for part, name in named.items())
    (tmp_path / "try.yaml").write_text(
        f'environment: {{{names}, agent: "tried_module:ask"}}\n'
        f"policy: {SMALL}\nrollout: {{max_tokens: 8}}\nstorage: {{root: {tmp_path / 'runs'}}}\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SF_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield str(tmp_path / "try.yaml")
    sys.modules.pop("tried_module", None)
    assert not (tmp_path / "runs").exists(), "nothing is stored"


@pytest.mark.parametrize("agent", ["ask", "ask_async"])
def test_an_agent_is_shown_with_its_conversation_and_reward(trial_yaml: str, agent: str) -> None:
    code, output = sf("try", trial_yaml, "--index", "4", "--set", f"environment.agent=tried_module:{agent}")
    assert code == 0, output
    assert "task add-train-4 of addition: What is 4+3?" in output
    assert "the built-in policy, untrained" in output
    asked = output.index("user: What is 4+3?")
    answered = output.index("assistant, ")
    assert asked < output.index("prompt, 11 tokens: <|im_start|>user What is 4+3?<|im_end|>") < answered
    assert answered < output.index("the agent answered: ") < output.index("reward: 0.5 (right 0, there 0.5)")
    assert ("user: Sure?" in output) == (agent == "ask")


def test_a_task_of_a_mixture_is_worked_on_by_its_part(trial_yaml: str) -> None:
    own = "{tasks: tried_module:tasks, agent: tried_module:ask, reward: tried_module:reward}"
    parts = f"{{words: {{name: quickstart}}, own: {own}}}"
    named = ("--set", "environment={name: mixture}", "--set", f"environment.settings.parts={parts}")
    for index, told in (("0", "words/spell_backward-train-0 of words"), ("5", "own/add-train-2 of own")):
        code, output = sf("try", trial_yaml, *named, "--index", index)
        assert code == 0, output
        assert f"task {told}: " in output
    assert "user: Sure?" in output and "reward: 0.5 (right 0, there 0.5)" in output


def test_what_judges_say_is_shown(trial_yaml: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SF_JUDGE_KEY_QUALITY", "secret-key")
    with JudgeServer().serving() as judge:
        named = (
            "environment.reward=tried_module:asks_judge",
            f"environment.judges={{quality: {{url: {judge.url}}}}}",
        )
        options = [word for setting in named for word in ("--set", setting)]
        code, output = sf("try", trial_yaml, "--index", "4", *options)
    assert code == 0, output
    assert judge.keys == ["Bearer secret-key"] and "secret-key" not in output
    assert 'judge quality: right {"yes":0.' in output and "(10 tokens, 1 calls, " in output
    assert "reward: 0.8" in output


def test_a_command_as_agent_is_shown_with_what_it_writes(trial_yaml: str) -> None:
    script = (
        "import os, json, urllib.request as u, sys\n"
        "body = json.dumps({'model': os.environ['OPENAI_MODEL'], 'messages': "
        "[{'role': 'user', 'content': sys.stdin.read()}]}).encode()\n"
        "u.urlopen(u.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions', body, "
        "{'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']})).read()\n"
        "print('7'); print('looked', file=sys.stderr)"
    )
    Path("agent_command.py").write_text(script, encoding="utf-8")
    command = f"{{command: [{sys.executable}, {Path.cwd()}/agent_command.py]}}"
    code, output = sf("try", trial_yaml, "--index", "4", "--set", f"environment.agent={command}")
    assert code == 0, output
    assert "looked" in output
    assert "reward: 1.5 (right 1, there 0.5)" in output


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("agent=tried_module:name_error", "NameError: name 'json' is not defined"),
        ("agent=tried_module:no_await", "AttributeError: 'coroutine' object has no attribute 'choices'"),
        ("agent=tried_module:takes_one", "takes (task), but is called with (task, endpoint): too many"),
        ("agent=tried_module:never_asks", "the agent got no answer from the policy"),
        ("agent=tried_module:ends_without", "the agent tried_module:ends_without (tried_module.py:"),
        (
            "agent=tried_module:ends_without",
            "returned None, for which the reward function tried_module:",
        ),
        ("agent=tried_module:own_address", "APIConnectionError: Connection error."),
        ("reward=tried_module:no_reward", "returned None, which is not a finite number"),
        ("tasks=tried_module:dictionary", "dict"),
    ],
)
@pytest.mark.filterwarnings("ignore:coroutine")
def test_a_mistake_is_told_in_one_sentence_with_its_place(
    trial_yaml: str, setting: str, sentence: str
) -> None:
    code, output = sf("try", trial_yaml, "--set", f"environment.{setting}")
    assert code != 0, output
    place = "tried_module.py:"
    [told] = output.split("error: ")[1:]
    assert place in told
    assert sentence in told
    assert "sf_core/" not in output, "the frames of our package are left out"


@pytest.mark.parametrize(
    ("agent", "line"),
    [
        ("blocks", "time.sleep(60)"),
        ("calls", "urllib.request.urlopen("),
        ("computes", "while True: sum(range(99))"),
    ],
)
def test_an_agent_that_blocks_the_event_loop_is_ended(
    trial_yaml: str, agent: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_loop, "BLOCKED_S", 0.7)
    code, output = sf("try", trial_yaml, "--set", f"environment.agent=tried_module:{agent}")
    assert code == 1, output
    assert line in output
    assert "error: the agent failed at tried_module.py:" in output
    assert "the agent blocked the event loop for 0.7 s" in output


@pytest.mark.parametrize("status", [200, 401])
def test_an_agent_is_tried_against_an_endpoint_elsewhere(
    trial_yaml: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a-key")

    async def answer(request: Request) -> JSONResponse:
        if status != 200:
            return JSONResponse({"error": {"message": "No such key."}}, status)
        body = await request.json()
        assert (body["model"], request.headers["authorization"]) == ("large", "Bearer a-key")
        message = {"role": "assistant", "content": "7" if len(body["messages"]) > 1 else "5"}
        return JSONResponse({"choices": [{"message": message, "finish_reason": "stop", "index": 0}]})

    canned = Starlette(routes=[Route("/api/v1/chat/completions", answer, methods=["POST"])])
    with serve_app(canned) as url:
        code, output = sf(
            "try", trial_yaml, "--index", "4", "--endpoint", f"{url}/api/v1", "--model", "large"
        )
    if status == 200:
        assert code == 0, output
        assert "user: What is 4+3? assistant: 5 user: Sure? assistant: 7 the agent answered: 7" in output
        assert "reward: 1.5 (right 1, there 0.5)" in output
    else:
        assert code == 1, output
        assert "refused with 401" in output


def test_tasks_that_change_are_told_before_anything_is_served(trial_yaml: str) -> None:
    code, output = sf("try", trial_yaml, "--set", "environment.tasks=tried_module:changing")
    assert code != 0 and "tried_module:changing (tried_module.py:" in output
    assert "gave different tasks in two calls" in output and "policy:" not in output


def test_answers_of_a_model_may_be_as_long_as_in_a_run_of_it(trial_yaml: str, tmp_path: Path) -> None:
    model = str(tmp_path / "model")
    shape = load_config(trial_yaml).policy
    make_policy(model, shape, 0)
    sets = [f"policy.model={model}", "rollout.max_tokens=null", "engine.context_length=600"]
    code, output = sf("try", trial_yaml, *(word for one in sets for word in ("--set", one)))
    assert code == 0, output
    lengths = [int(number) for number in re.findall(r"assistant, (\d+) tokens", output)]
    assert max(lengths) > 64, "the default of the built-in policy"


def test_an_agent_without_an_answer_is_named_where_its_reward_needs_none(trial_yaml: str) -> None:
    named = ("environment.agent=tried_module:ends_without", "environment.reward=tried_module:any_answer")
    code, output = sf("try", trial_yaml, *(word for one in named for word in ("--set", one)))
    assert code == 0, output
    assert "note: the agent tried_module:ends_without (tried_module.py:" in output
    assert output.endswith(
        "returned None: if the reward function needs an answer, the agent lacks a `return` reward: 0.25"
    )


def tried(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any, str]:
    """Exit code, the document on standard output, and standard error."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        app(["try", *arguments, "--json"])
    written = capfd.readouterr()
    return int(ended.value.code or 0), json.loads(written.out), written.err


def test_a_trial_is_one_json_document(trial_yaml: str, capfd: pytest.CaptureFixture[str]) -> None:
    code, found, _ = tried(capfd, trial_yaml, "--index", "4")
    assert code == 0
    named = {"task_id": "add-train-4", "environment": "addition", "split": "train", "index": 4}
    assert found["task"] == {**named, "prompt": "What is 4+3?", "answer": "7"}
    assert found["policy"].startswith("the built-in policy, untrained")
    first, second = found["requests"]
    assert first["messages"] == [{"role": "user", "content": "What is 4+3?"}]
    assert first["prompt"].startswith("<|im_start|>user\nWhat is 4+3?<|im_end|>")
    assert first["prompt_tokens"] == first["new_tokens"] == 11
    [answer] = first["answers"]
    assert answer["message"]["role"] == "assistant" and answer["tokens"] <= 8
    assert answer["finish_reason"] in ("stop", "length")
    assert second["messages"][-1] == {"role": "user", "content": "Sure?"}
    assert second["prompt_tokens"] > second["new_tokens"]
    assert found["answer"] == second["answers"][0]["message"]["content"]
    assert (found["reward"], found["reward_parts"]) == (0.5, {"right": 0.0, "there": 0.5})
    left = ("output", "judgements", "notes", "error", "step_rewards")
    assert [found[name] for name in left] == [None, [], [], None, {}]


def test_what_an_agent_prints_stays_out_of_the_document(
    trial_yaml: str, capfd: pytest.CaptureFixture[str]
) -> None:
    code, found, told = tried(capfd, trial_yaml, "--set", "environment.agent=tried_module:prints")
    assert (code, found["error"]) == (0, None)
    assert "printed by the agent" in told and "printed by a program" in told


def test_an_answer_that_is_no_json_is_shown_as_text(
    trial_yaml: str, capfd: pytest.CaptureFixture[str]
) -> None:
    named = ("environment.agent=tried_module:odd", "environment.reward=tried_module:any_answer")
    code, found, _ = tried(capfd, trial_yaml, *(word for one in named for word in ("--set", one)))
    assert (code, found["reward"]) == (0, 0.25)
    assert found["answer"] == "{1: {'a set'}, 'bad': '\\udc80'}"


def test_a_mistake_is_part_of_the_document(trial_yaml: str, capfd: pytest.CaptureFixture[str]) -> None:
    code, found, told = tried(capfd, trial_yaml, "--set", "environment.agent=tried_module:name_error")
    error = found["error"]
    assert (code, told, found["reward"], found["requests"]) == (1, "", None, [])
    assert (error["phase"], error["type"]) == ("the agent", "NameError")
    assert error["message"].startswith(f"the agent failed at {error['place']}: NameError: name 'json' is not")
    assert error["place"].startswith("tried_module.py:") and "return json.loads(" in error["traceback"]


def test_a_run_that_is_not_there_is_refused(trial_yaml: str, tmp_path: Path) -> None:
    code, output = sf("try", trial_yaml, "--set", "run_id=frist")
    told = f"error: --set run_id=frist: {tmp_path}/runs/frist: no run here"
    assert (code, output.startswith(told)) == (2, True), output
    assert output.endswith("; leave run_id out to try the policy that a new run would start from")


def test_a_run_that_a_file_names_may_be_still_to_come(trial_yaml: str) -> None:
    file = Path(trial_yaml)
    file.write_text(f"run_id: first\n{file.read_text(encoding='utf-8')}", encoding="utf-8")
    code, output = sf("try", trial_yaml)
    assert (code, "the built-in policy, untrained" in output) == (0, True), output
