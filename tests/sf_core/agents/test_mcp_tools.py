"""Tools of real MCP servers, over both transports, and servers that die, hang or are no servers."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from sf_core.agents.mcp_tools import mcp_tools
from sf_core.agents.tool_loop import LostToolError, Tool, run_tool_loop
from sf_core.cli.stack.local import free_port
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.types import Endpoint, Task
from tests.bench import runners, waits
from tests.bench.dataplane import planes

pytestmark = pytest.mark.system

PAD = [sys.executable, str(Path(__file__).parent / "mcp_pad.py")]
STDIO = [*PAD, "stdio"]


@pytest.fixture
def over_http() -> Iterator[str]:
    port = free_port()
    process = subprocess.Popen([*PAD, "streamable-http", str(port)], stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}/mcp"

    def listens() -> bool:
        assert process.poll() is None
        with contextlib.suppress(httpx.TransportError):
            httpx.get(url)
            return True
        return False

    waits.wait_until(listens, url, every_s=0.05)
    yield url
    process.kill()
    process.wait()


@pytest.fixture(params=["stdio", "http"])
def pad(request: pytest.FixtureRequest) -> Any:
    return STDIO if request.param == "stdio" else request.getfixturevalue("over_http")


async def using(plane: Any, use: Any, timeout_s: float = 60.0) -> Any:
    async with mcp_tools(plane, timeout_s=timeout_s) as tools:
        return await use({tool.name: tool for tool in tools})


async def test_tools_are_listed_and_called(pad: Any) -> None:
    async def use(tools: dict[str, Tool]) -> list[str]:
        assert list(tools) == ["add", "die", "hang"]
        described = tools["add"]
        assert described.description == "Add two numbers."
        assert list(described.parameters["properties"]) == ["a", "b"]
        with pytest.raises(ValueError, match="Error executing tool add"):
            await described.function(a="x")
        return [await described.function(a=number, b=2) for number in (1, 40)]

    assert await using(pad, use) == ["3", "42"]


def test_an_agent_uses_them_over_the_gateway(
    plane_process: planes.ServedPlane, renderer: Renderer, pad: Any
) -> None:
    plane_process.register(group_size=1, groups_per_batch=1, num_batches=1, max_tokens=100)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 20, "b": 22}}\n</tool_call>'
    plane_process.connect(planes.answering(renderer, call, "42"))

    async def agent(task: Task, endpoint: Endpoint) -> str:
        async with mcp_tools(pad) as tools:
            return await run_tool_loop(endpoint, task.prompt, tools)

    rewards: list[str] = []

    def reward(task: Task, answer: str) -> float:
        rewards.append(answer)
        return 1.0

    runners.run_until_ready(
        plane_process, runners.make_runner(plane_process.url, agent=agent, reward=reward, concurrency=1)
    )
    assert rewards == ["42"] and len(plane_process.asked) == 2


async def test_a_server_that_dies_is_told_with_its_last_words() -> None:
    async def use(tools: dict[str, Tool]) -> None:
        await tools["die"].function()

    with pytest.raises(LostToolError, match=r"mcp_pad\.py stdio has ended; it wrote last: .*out of paper$"):
        await using(STDIO, use)


async def test_a_server_that_hangs_is_told_and_ended(tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    async def use(tools: dict[str, Tool]) -> None:
        await tools["hang"].function(mark=str(mark))

    with pytest.raises(LostToolError, match=r"^MCP server .*mcp_pad\.py stdio did not answer within 20 s$"):
        await using(STDIO, use, timeout_s=20)
    assert not psutil.pid_exists(int(mark.read_text(encoding="utf-8")))


async def test_a_session_that_is_cancelled_ends_its_server(tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    async def work() -> None:
        async with mcp_tools(STDIO) as tools:
            await {tool.name: tool for tool in tools}["hang"].function(mark=str(mark))

    working = asyncio.create_task(work())
    await waits.until(lambda: working.done() or (mark.exists() and mark.read_text(encoding="utf-8")))
    assert not working.done()
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert not psutil.pid_exists(int(mark.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (
            ["/no/such/server"],
            r"^MCP server /no/such/server cannot be used: FileNotFoundError: .*No such file",
        ),
        (["false"], r"^MCP server false has ended$"),
        (["sleep", "600"], r"^MCP server sleep 600 did not answer within 2 s$"),
        ("http://127.0.0.1:9/mcp", r"^MCP server http://127\.0\.0\.1:9/mcp cannot be used: "),
    ],
)
async def test_what_is_no_server_is_told_in_one_sentence(command: Any, sentence: str) -> None:
    async def use(tools: dict[str, Tool]) -> None:
        raise AssertionError(tools)

    with pytest.raises(LostToolError, match=sentence) as lost:
        await using(command, use, timeout_s=2)
    assert "\n" not in str(lost.value)
    assert "sleep" not in {child.name() for child in psutil.Process().children(recursive=True)}


async def test_an_error_of_the_agent_stays_what_it_is(pad: Any) -> None:
    async def use(tools: dict[str, Tool]) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await using(pad, use)


def test_the_loop_ends_with_a_tool_that_is_lost(
    plane_process: planes.ServedPlane, renderer: Renderer
) -> None:
    plane_process.register(
        group_size=1, groups_per_batch=1, num_batches=1, max_tokens=100, session_attempts=1
    )
    call = '<tool_call>\n{"name": "die", "arguments": {}}\n</tool_call>'
    plane_process.connect(planes.answering(renderer, call, "42"))
    raised: list[str] = []

    async def agent(task: Task, endpoint: Endpoint) -> str:
        try:
            async with mcp_tools(STDIO) as tools:
                return await run_tool_loop(endpoint, task.prompt, tools)
        except LostToolError as error:
            raised.append(str(error))
            return "42"

    runners.run_until_ready(plane_process, runners.make_runner(plane_process.url, agent=agent, concurrency=1))
    assert len(raised) == 1 and "has ended; it wrote last: " in raised[0]
