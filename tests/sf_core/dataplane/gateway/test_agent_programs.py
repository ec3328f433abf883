"""Public agent programs, unchanged: they get a base URL and a key, and a scripted engine as model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from agents import Agent, Runner, function_tool, set_tracing_disabled
from agents.models.multi_provider import MultiProvider
from agents.run import RunConfig
from openai import AsyncOpenAI

from sf_core.agents.command import CommandAgent
from sf_core.config.programs import Command
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.gateway.dialects.registry import find_dialect as dialect_of
from sf_core.types import Endpoint, Task
from tests.bench import dataplane
from tests.bench.waits import patience
from tests.sf_core.dataplane.gateway import overflows

# its litellm imports mcp without asking for it
MINI_SWE_AGENT = ["mini-swe-agent==2.4.6", "litellm==1.106.2", "mcp==2.3.0"]
VENV = Path(__file__).parents[4] / ".venvs" / "mini-swe-agent"
NODE = VENV.parent / "node"
WRITE = "echo 42 > answer.txt"


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def is_one_sequence(plane: dataplane.planes.ServedPlane, session_id: str) -> bool:
    """Whether every request continued the tokens of the one before."""
    tree = plane.get(f"/sessions/{session_id}")
    parents = [prompt["parent_turn"] for prompt in tree["prompts"]]
    return parents == [None, *range(len(tree["turns"]) - 1)] and not tree["branch_reasons"]


@function_tool
def weather(city: str) -> str:
    """Tells the weather."""
    return f"sunny in {city}"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("use_responses", [True, False])
async def test_openai_agents_calls_tools_and_answers(
    served_plane: dataplane.planes.ServedPlane, renderer: Renderer, use_responses: bool, streamed: bool
) -> None:
    served_plane.register(context_length=8192, max_tokens=256)
    two_calls = "Let me see. " + call("weather", city="Rome") + "\n" + call("weather", city="Oslo")
    served_plane.connect(dataplane.planes.answering(renderer, two_calls, "Sunny in both."))
    opened = served_plane.client.post("/sessions", {"run_id": "run"})
    set_tracing_disabled(True)
    key = f"session:{opened['session_id']}"
    agent = Agent(name="guide", instructions="Be brief.", tools=[weather], model="policy")

    async def run(question: str = "How is it in Rome and Oslo?") -> str:
        async with AsyncOpenAI(base_url=f"{served_plane.url}/v1", api_key=key) as client:
            provider = MultiProvider(openai_client=client, openai_use_responses=use_responses)
            config = RunConfig(model_provider=provider)
            if not streamed:
                return str((await Runner.run(agent, question, run_config=config)).final_output)
            running = Runner.run_streamed(agent, question, run_config=config)
            async for _ in running.stream_events():
                pass
            return str(running.final_output)

    assert await run() == "Sunny in both."
    assert is_one_sequence(served_plane, opened["session_id"])
    recorded = served_plane.asked[0].prompt_ids + dataplane.planes.say(renderer, two_calls)
    assert served_plane.asked[1].prompt_ids[: len(recorded)] == recorded
    said = renderer.decode(served_plane.asked[1].prompt_ids)
    assert "sunny in Rome" in said
    assert "sunny in Oslo" in said


@pytest.fixture(scope="session")
def mini() -> Path:
    """The program in an environment of its own, because it needs other versions than the tests."""
    program = VENV / "bin" / "mini"
    if not program.exists():
        try:
            subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True, capture_output=True)
            install = [str(VENV / "bin" / "pip"), "install", "--quiet", "--retries=1", *MINI_SWE_AGENT]
            subprocess.run(
                install, check=True, capture_output=True, text=True, timeout=patience(240), encoding="utf-8"
            )
        except (subprocess.SubprocessError, OSError) as error:
            if os.environ.get("CI") == "true":
                raise
            pytest.skip(f"{MINI_SWE_AGENT[0]} cannot be installed into {VENV}: {error}")
    return program


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("openai/policy", []),
        ("anthropic/policy", []),
        ("openai/policy", ["--model-class", "litellm_response"]),
    ],
)
def test_mini_swe_agent_solves_its_task(
    served_plane: dataplane.planes.ServedPlane,
    renderer: Renderer,
    mini: Path,
    tmp_path: Path,
    model: str,
    options: list[str],
) -> None:
    served_plane.register(context_length=32768, max_tokens=512)
    first = "I write the answer. " + call("bash", command="echo 42 > answer.txt")
    last = "Done. " + call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    served_plane.connect(dataplane.planes.answering(renderer, first, last))
    opened = served_plane.client.post("/sessions", {"run_id": "run"})
    key = f"session:{opened['session_id']}"
    environment = os.environ | {
        "OPENAI_BASE_URL": f"{served_plane.url}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": served_plane.url,
        "ANTHROPIC_API_KEY": key,
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_GLOBAL_CONFIG_DIR": str(tmp_path / "config"),
        "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    command = [str(mini), "--model", model, *options, "--yolo", "--exit-immediately"]
    command += ["--task", "Write 42.", "--output", str(tmp_path / "out.json")]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=patience(),
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "answer.txt").read_text(encoding="utf-8") == "42\n"
    assert is_one_sequence(served_plane, opened["session_id"])


ASK_LITELLM = """
import json, sys, litellm

url, key, ways = sys.argv[1:]
litellm.suppress_debug_info = True
long = "the " * 3000
bases = {"openai": url + "/v1", "anthropic": url, "gemini": url + "/v1beta"}
for model in ("policy", "nobody"):
    for provider in (*bases, "responses"):
        for stream in json.loads(ways):
            options = {"api_key": key, "stream": stream, "num_retries": 0}
            try:
                if provider == "responses":
                    options |= {"input": long, "api_base": bases["openai"]}
                    answer = litellm.responses(model=f"openai/{model}", **options)
                else:
                    options |= {"messages": [{"role": "user", "content": long}], "api_base": bases[provider]}
                    answer = litellm.completion(model=f"{provider}/{model}", **options)
                list(answer)
                raised = None
            except Exception as error:
                raised = type(error).__name__
            print(json.dumps([model, provider, stream, raised]))
"""


def ask_litellm(mini: Path, url: str, key: str, ways: tuple[bool, ...]) -> list[list[Any]]:
    command = [str(mini.with_name("python")), "-c", ASK_LITELLM, url, key, json.dumps(ways)]
    environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=patience(120), encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def all_raise(policy: str, nobody: str, ways: tuple[bool, ...]) -> list[list[Any]]:
    return [
        [model, provider, streamed, raised]
        for model, raised in (("policy", policy), ("nobody", nobody))
        for provider in ("openai", "anthropic", "gemini", "responses")
        for streamed in ways
    ]


@pytest.mark.nightly
def test_litellm_knows_what_is_wrong_with_a_request(
    served_plane: dataplane.planes.ServedPlane, mini: Path
) -> None:
    ways = (False, True)
    served_plane.register()
    opened = served_plane.client.post("/sessions", {"run_id": "run"})
    told = ask_litellm(mini, served_plane.url, f"session:{opened['session_id']}", ways)
    assert told == all_raise("ContextWindowExceededError", "NotFoundError", ways)
    with dataplane.planes.running_app(key="secret") as url:
        told = ask_litellm(mini, url, "wrong", ways)
    assert told == all_raise("AuthenticationError", "AuthenticationError", ways)


class FailingStreams(BaseHTTPRequestHandler):
    """Answers every request with a stream that fails after it began."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        dialect = dialect_of(self.path.partition("?")[0])
        assert dialect is not None
        [client] = [client for client in dataplane.clients.CLIENTS if client.dialect.name == dialect.name]
        data = overflows.failed_stream(client, overflows.overflow_of(client))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.mark.nightly
def test_litellm_knows_an_overflow_inside_a_stream(mini: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), FailingStreams) as failing:
        threading.Thread(target=failing.serve_forever, daemon=True).start()
        told = ask_litellm(mini, f"http://127.0.0.1:{failing.server_port}", "none", (True,))
        failing.shutdown()
    assert told == all_raise("ContextWindowExceededError", "ContextWindowExceededError", (True,))


def from_npm(package: str) -> str:
    """The folder with a package's programs."""
    folder = NODE / package.replace("/", "-")
    try:
        install = ["npm", "install", "--prefix", str(folder), "--prefer-offline", "--no-audit", package]
        subprocess.run(install, check=True, capture_output=True, timeout=patience(240))
    except (subprocess.SubprocessError, OSError) as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"{package} cannot be installed into {folder}: {error}")
    return str(folder / "node_modules" / ".bin")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("package", "command", "first"),
    [
        (
            "@anthropic-ai/claude-code@2.1.197",
            "IS_SANDBOX=1 exec claude -p --dangerously-skip-permissions",
            call("Bash", command=WRITE, description="writes"),
        ),
        (
            "@openai/codex@0.169.0",
            "CODEX_API_KEY=$OPENAI_API_KEY exec codex exec --skip-git-repo-check -m $OPENAI_MODEL "
            "--dangerously-bypass-approvals-and-sandbox -c openai_base_url=$OPENAI_BASE_URL -",
            call("exec_command", cmd=WRITE),
        ),
        (
            "@qwen-code/qwen-code@0.15.10",
            'exec qwen --yolo --auth-type openai -p "$(cat)"',
            call("run_shell_command", command=WRITE, is_background=False),
        ),
    ],
    ids=["claude-code", "codex", "qwen-code"],
)
async def test_a_harness_as_a_command_writes_a_file_in_one_row(
    served_plane: dataplane.planes.ServedPlane, renderer: Renderer, package: str, command: str, first: str
) -> None:
    programs = from_npm(package)
    served_plane.register(context_length=200_000, max_tokens=512)
    served_plane.connect(dataplane.planes.answering(renderer, "I write it. " + first, "Done."))
    opened = served_plane.client.post("/sessions", {"run_id": "run"})
    endpoint = Endpoint(f"{served_plane.url}/sessions/{opened['session_id']}/v1", "none", "policy")
    path = {"PATH": f"{programs}:{os.environ['PATH']}"}
    setting = Command(command=("bash", "-c", command), answer="file:answer.txt", variables=path)
    end = await CommandAgent(setting).run(Task("t", "e", "Write 42 into answer.txt."), endpoint)
    assert end.answer == "42\n"
    assert is_one_sequence(served_plane, opened["session_id"])
