"""A run without work: instant tasks, a one-request agent and canned tokens; and plain Prefect flows of no-op
tasks as the baseline. Used by benchmarks/orchestration.py."""

from __future__ import annotations

import sys
import time
from typing import Any

import dask
import httpx
from prefect import flow, task
from prefect_dask import DaskTaskRunner

from sf_core.types import Endpoint, Task


def tasks(split: str, index: int) -> Task:
    return Task(f"{split}-{index}", "nothing", "hello")


async def agent(task: Task, endpoint: Endpoint) -> str:
    async with httpx.AsyncClient() as http:
        body = {"model": endpoint.model, "messages": [{"role": "user", "content": task.prompt}]}
        response = await http.post(f"{endpoint.base_url}/chat/completions", json=body)
        return str(response.raise_for_status().json()["choices"][0]["message"]["content"])


def reward(task: Task, answer: str) -> float:
    return float(len(answer) % 2)


def script(prompt_ids: list[int], seed: int) -> list[int]:
    return [20 + seed % 8, 21]


@task
def noop(name: str, iteration: int) -> str:
    return name


def plain_iterations(address: str, iterations: int) -> list[float]:
    """Seconds per iteration of subflows with four no-op tasks in sequence, on Prefect and Dask alone."""
    seconds = []

    @flow(task_runner=DaskTaskRunner(address=address))  # type: ignore[arg-type]
    def plain_iteration(number: int) -> None:
        for name, tag in (("rollout", "cpu"), ("filter", "cpu"), ("train", "train"), ("publish", "cpu")):
            with dask.annotate(resources={tag: 1}):
                noop.submit(name, number).result()

    @flow
    def plain() -> None:
        for number in range(iterations):
            start = time.perf_counter()
            plain_iteration(number)
            seconds.append(time.perf_counter() - start)

    plain()
    return seconds


def main(arguments: list[str]) -> Any:
    import json

    print(json.dumps(plain_iterations(arguments[0], int(arguments[1]))))


if __name__ == "__main__":
    main(sys.argv[1:])
