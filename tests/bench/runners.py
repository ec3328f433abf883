"""Runners of agents at a data plane."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from sf_core.agents.runner import AgentRunner
from sf_core.config import RolloutConfig
from sf_core.dataplane.operator_key import operator_key
from sf_core.types import Task
from tests.bench.dataplane.planes import ServedPlane
from tests.bench.stacks.echo_package import agent
from tests.bench.waits import patience


def make_runner(url: str, **changes: Any) -> AgentRunner:
    usual: dict[str, Any] = {
        "key": operator_key(url),
        "run_id": "run",
        "runner_id": "a0",
        "tasks": lambda split, index: Task(f"t{index}", "e", "6 * 7?", "42"),
        "agent": agent,
        "reward": lambda task, answer: float(answer == task.answer),
        "seed": 0,
    }
    names = usual.keys() | {"runner_id", "patience_s", "work", "prepare"}
    rules = {name: value for name, value in changes.items() if name not in names}
    given = {name: value for name, value in changes.items() if name in names}
    return AgentRunner(url=url, rules=RolloutConfig(**{"concurrency": 2} | rules), **usual | given)


def run_until_ready(plane: ServedPlane, runner: AgentRunner) -> None:
    """Run the runner until batch 0 is full, then release the run."""

    async def work() -> None:
        working = asyncio.ensure_future(runner.run())
        headers = plane.http.headers
        async with httpx.AsyncClient(base_url=plane.url, headers=headers, timeout=patience()) as http:
            while not (await http.get("/runs/run/batches/0", params={"wait_s": 10})).json()["ready"]:
                assert not working.done()
            await http.post("/runs/run/release")
        await working

    asyncio.run(asyncio.wait_for(work(), patience()))
