"""What preparing ahead saves: a section of benchmarks/harness.py, with a data plane and a runner in full."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gateway_stand import Gateway, gateway
from sf_core.agents.runner import AgentRunner
from sf_core.cli.stack.local import local_stack
from sf_core.config import RolloutConfig
from sf_core.dataplane.operator_key import operator_key
from sf_core.types import Endpoint, Task

PLACES = 4
AHEAD = 8
PREPARE_S = 2.0
WORK_S = 1.0


async def sessions(ours: Gateway, ahead: int, number: int) -> dict[str, float]:
    """Figures of so many sessions of PREPARE_S and WORK_S each, on PLACES places."""
    run_id = f"ahead-{ahead}"
    ours.register(run_id, prepare_ahead=ahead)
    await asyncio.to_thread(ours.connect, run_id, "e0", 0)
    claimed: dict[str, float] = {}
    asked: dict[str, float] = {}
    free: list[float] = []
    """When a place was given back that no session has taken."""
    waits: list[float] = []
    is_done = asyncio.Event()

    @asynccontextmanager
    async def prepare(task: Task) -> AsyncIterator[None]:
        claimed.setdefault(task.task_id, time.perf_counter())
        await asyncio.sleep(PREPARE_S)
        yield

    async def agent(task: Task, endpoint: Endpoint, prepared: None) -> None:
        now = asked[task.task_id] = time.perf_counter()
        if free:
            waits.append(now - free.pop(0))
        async with endpoint.client() as client:
            words: Any = [{"role": "user", "content": "4"}]
            await client.chat.completions.create(model=endpoint.model, messages=words, max_tokens=1)
        await asyncio.sleep(WORK_S)
        free.append(time.perf_counter())
        if len(asked) >= number:
            is_done.set()

    rules = RolloutConfig(concurrency=PLACES, prepare_ahead=ahead)
    ids = iter(range(10**6))
    runner = AgentRunner(
        url=str(ours.http.base_url),
        key=operator_key(str(ours.http.base_url)),
        run_id=run_id,
        runner_id="a0",
        # equal tasks of a group would have equal names
        tasks=lambda split, index: Task(f"t{next(ids)}", "preparing", "?"),
        agent=agent,
        reward=lambda task, answer: 1.0,
        prepare=prepare,
        rules=rules,
        seed=0,
    )
    start = time.perf_counter()
    working = asyncio.create_task(runner.run())
    await is_done.wait()
    seconds = time.perf_counter() - start
    await asyncio.to_thread(ours.post, f"/runs/{run_id}/release")
    await working
    return {
        "sessions_per_s": round(len(asked) / seconds, 2),
        "claim_to_request_s": round(median(asked[name] - claimed[name] for name in asked), 2),
        "place_to_request_s": round(median(waits), 2),
    }


def preparing(number: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with local_stack(folder / "logs", {}) as stack, gateway(stack, folder) as ours:
            return {
                name: asyncio.run(sessions(ours, ahead, number))
                for name, ahead in (("ahead", AHEAD), ("when_it_runs", 0))
            }
