"""A runner that scores answers by a judge, as a process: python -m ... DATA_PLANE NAME JUDGE."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sf_core.agents.judges import client, judges
from sf_core.agents.judges.judges import Judges, endpoint_of
from sf_core.agents.runner import AgentRunner
from sf_core.config import RolloutConfig
from sf_core.config.rollout_config import JudgeConfig
from sf_core.dataplane.operator_key import operator_key
from sf_core.types import Task


def make_task(split: str, index: int) -> Task:
    return Task(f"{split}-{index}", "test", "?", "answer")


async def reward(task: Task, answer: Any, judges: Mapping[str, judges.Judge]) -> float:
    """One question for each answer; never 0."""
    return 1.0 + float(await judges["taste"].ask(f"{task.task_id}: {answer}", "mark", read=float))


def make_scorer(url: str, name: str, judge_url: str) -> AgentRunner:
    # above temperature 0 every session has its own question
    config = JudgeConfig(url=judge_url, temperature=0.5, timeout_s=1.0)
    client.FIRST_PAUSE_S = 0.01
    return AgentRunner(
        url=url,
        key=operator_key(url),
        run_id="run",
        runner_id=name,
        tasks=make_task,
        agent=lambda task, endpoint: None,
        reward=reward,
        rules=RolloutConfig(score_timeout_s=2.0, concurrency=4),
        seed=0,
        work="reward",
        judges=Judges({"taste": config}, {"taste": endpoint_of("taste", config)}),
    )


@contextmanager
def scorer_process(url: str, name: str, judge_url: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-m", __name__, url, name, judge_url])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    asyncio.run(make_scorer(*sys.argv[1:]).run())
