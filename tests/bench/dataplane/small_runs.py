"""A run without a data plane, and what is done on it."""

from __future__ import annotations

from typing import Any

from openai import OpenAI

from tests.bench.dataplane.planes import ServedPlane


def work(plane: ServedPlane, claim: dict[str, Any], reward: float = 1.0) -> None:
    """Do what an agent and its runner do: one turn, then the report."""
    session = f"/sessions/{claim['session_id']}"
    with OpenAI(base_url=f"{plane.url}{session}/v1", api_key=claim["key"], max_retries=0) as agent:
        messages: Any = [{"role": "user", "content": f"task {claim['task_index']}"}]
        agent.chat.completions.create(model="policy", messages=messages)
    finish(plane, claim, reward)


def finish(plane: ServedPlane, claim: dict[str, Any], reward: float = 1.0) -> None:
    report = {
        "status": "finished",
        "reward": reward,
        "reward_parts": {"right": reward},
        "task_id": f"task-{claim['task_index']}",
        "environment": "test",
    }
    plane.post(f"/sessions/{claim['session_id']}/finish", report)


def seal(plane: ServedPlane, batch: int, attempt: int = 1) -> dict[str, Any]:
    return plane.post(f"/runs/run/batches/{batch}/seal", {"attempt": attempt})
