"""Runs on a served data plane, as agents, runners and the trainer use them."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sf_core.agents.runner import AgentRunner
from sf_core.config import RolloutConfig
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.turns.sampling import derive_seed
from sf_core.types import Endpoint, Task
from storage.run_directory import RunDirectory
from storage.tables.schema import Trajectory
from storage.tables.trajectories import read_trajectories, to_rows
from tests.bench.dataplane.planes import BUDGET, ServedPlane, converse
from tests.bench.dataplane.restarts import Restarts
from tests.bench.waits import join, wait_until


def stored(run_dir: Path) -> list[tuple[int, Trajectory]]:
    """All rows, with the policy version of their folder."""
    files = RunDirectory(str(run_dir)).list_partitions("opened")
    return [(v, row) for v, uris in files.items() for uri in uris for row in to_rows(read_trajectories(uri))]


STOP = 1
"""<|im_end|> of the test tokenizer."""


def script(prompt_ids: list[int], seed: int) -> list[int]:
    """Up to 400 random tokens: some answers end by themselves, some by their budget."""
    generator = np.random.default_rng([seed, len(prompt_ids)])
    return [*generator.integers(2, 300, generator.integers(50, 400)).tolist(), STOP]


def agents_see_whole_answers(
    restarts: Restarts, renderer: Renderer, seed: int, kill: Callable[[random.Random], None]
) -> None:
    """Two agents, two kills at random moments, and a record that is exact."""
    plane = restarts.plane
    plane.register(groups_per_batch=1, max_tokens=BUDGET, context_length=100_000)
    plane.connect(script)
    claims = plane.claim(2)
    answers: dict[str, list[str]] = {}
    num_turns = 6

    def agent(claim: dict[str, Any], streamed: bool) -> None:
        answers[claim["session_id"]] = converse(plane, claim, num_turns, streamed)

    agents = [
        threading.Thread(target=agent, args=(claim, streamed))
        for claim, streamed in zip(claims, (True, False), strict=True)
    ]
    for thread in agents:
        thread.start()
    moments = random.Random(seed)
    for _ in range(2):
        threading.Event().wait(moments.uniform(0.05, 0.5))
        kill(moments)
    for thread in agents:
        join(thread)
    for claim in claims:
        report = {"status": "finished", "reward": 1.0, "task_id": "t", "environment": "e"}
        plane.post(f"/sessions/{claim['session_id']}/finish", report)
    sealed = plane.post("/runs/run/batches/0/seal", {"attempt": 1})
    rows = to_rows(read_trajectories(str(Path(restarts.folder, "run", sealed["files"][0]["uri"]))))

    assert [row.session_id for row in rows] == [claim["session_id"] for claim in claims]
    for row, claim in zip(rows, claims, strict=True):
        ids = row.token_ids.tolist()
        spans = [span for span in row.turns if span.role == "assistant"]
        for turn, (span, text) in enumerate(zip(spans, answers[row.session_id], strict=True)):
            seed_of_turn = derive_seed(7, ("train", claim["group"], claim["member"]), turn, 0)
            expected = script(ids[: span.start], seed_of_turn)[:BUDGET]
            assert ids[span.start : span.end] == expected
            assert text == renderer.decode([token for token in expected if token != STOP])
        assert sum(row.loss_mask) == sum(span.end - span.start for span in spans)
    for request in plane.asked:
        assert request.position + request.max_tokens == BUDGET


def claim(plane: ServedPlane, runner: str, count: int, work: str = "agent", *running: str) -> dict[str, Any]:
    body = {"runner": runner, "work": work, "max": count, "running": list(running)}
    return plane.note_keys(plane.post("/runs/run/claim", body))


def sessions(answer: dict[str, Any]) -> list[str]:
    return [session["session_id"] for session in answer["sessions"]]


def ask(plane: ServedPlane, session_id: str) -> None:
    body = {"model": "policy", "messages": [{"role": "user", "content": "?"}]}
    plane.post(f"/sessions/{session_id}/v1/chat/completions", body, plane.agent_key(session_id))


def answer_all(plane: ServedPlane, claimed: dict[str, Any]) -> list[str]:
    """Answer as agents and their runner do if other runners score."""
    for name in (names := sessions(claimed)):
        ask(plane, name)
    reports = [{"session_id": name, "status": "answered", "answer": f'"{name}"'} for name in names]
    assert plane.post("/runs/run/finished", {"sessions": reports})["finished"] == names
    return names


def score(plane: ServedPlane, names: list[str]) -> None:
    reports = [{"session_id": name, "status": "finished", "reward": 0.5} for name in names]
    assert plane.post("/runs/run/finished", {"sessions": reports})["finished"] == names


async def ask_for_an_answer(task: Task, endpoint: Endpoint) -> dict[str, str]:
    async with endpoint.client() as client:
        messages: Any = [{"role": "user", "content": task.prompt}]
        answer = await client.chat.completions.create(model="policy", messages=messages)
    return {"text": answer.choices[0].message.content or ""}


def run_runner(
    plane: ServedPlane,
    name: str,
    work: Literal["agent", "reward"],
    rules: RolloutConfig | None = None,
    **code: Any,
) -> None:
    def tasks(split: str, index: int) -> Task:
        return Task(f"{split}-{index}", "test", "?", "answer")

    given: dict[str, Any] = {"agent": ask_for_an_answer, "reward": lambda task, answer: 0.0} | code
    runner = AgentRunner(
        url=plane.url,
        key=plane.key,
        run_id="run",
        runner_id=name,
        tasks=tasks,
        rules=rules or RolloutConfig(concurrency=4),
        seed=0,
        work=work,
        **given,
    )
    plane.threads.append(threading.Thread(target=lambda: asyncio.run(runner.run()), daemon=True))
    plane.threads[-1].start()
    wait_until(lambda: name in plane.get("/runs/run")["runners"])


RETRY = {"x-stainless-retry-count": "1"}
