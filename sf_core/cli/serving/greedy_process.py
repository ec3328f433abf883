"""The process that `sf_core.cli.serving.policy` starts: a policy answers tasks at temperature 0."""

from __future__ import annotations

import asyncio
import secrets
import sys
import tempfile
from collections.abc import Collection

import httpx

from sf_core.agents.phases import Phases, Work, limit_time
from sf_core.cli.serving.local_plane import LocalPlane, local_plane
from sf_core.cli.serving.policy import fit_to_this_process, open_stored, rules_for_single_sessions
from sf_core.config import RolloutConfig, RunConfig
from sf_core.environments.registry import agent_of, draw_tasks, prepare_of, reward_of
from sf_core.process.import_path import import_from, user_folders
from sf_core.reports.evaluations.comparison import GivenAnswer, text_of_answer, write_greedy
from sf_core.types import Endpoint, Task
from storage.run_directory import RunDirectory

NAME = "greedy"
"""Name of the run whose sessions are these."""

PATIENCE_S = 60.0
"""Longest wait for the data plane, which is in this process."""


def store_greedy_answers(run: RunDirectory, version: int, task_ids: Collection[str]) -> None:
    """Have this version answer these held-out tasks, and store the answers. Raises an error if one fails."""
    policy = open_stored(run.uri, version)
    config = fit_to_this_process(policy)
    held_out = draw_tasks(config.environment, "holdout", range(config.evaluate.num_tasks))
    tasks = [task for task in held_out if task.task_id in task_ids]
    greedy = config.rollout.model_copy(update={"temperature": 0.0})
    rollout = rules_for_single_sessions(greedy, num_groups=len(tasks))
    key = secrets.token_urlsafe(24)
    with tempfile.TemporaryDirectory(prefix="sf-greedy-") as folder:
        run_dir = f"{folder}/{NAME}"
        with local_plane(policy, name=NAME, run_dir=run_dir, rollout=rollout, key=key) as plane:
            answers = asyncio.run(_answer_all(config, tasks, plane, key))
    write_greedy(run, version, answers)


async def _answer_all(
    config: RunConfig, tasks: list[Task], plane: LocalPlane, key: str
) -> dict[str, GivenAnswer]:
    environment = config.environment
    rules = config.rollout
    phases = Phases(rules, agent_of(environment), reward_of(environment), prepare_of(environment))
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(
        base_url=plane.url, headers=headers, trust_env=False, timeout=PATIENCE_S
    ) as http:
        answering = [_answer(task, rules, phases, plane, http) for task in tasks]
        answers = await asyncio.gather(*answering)
    return {task.task_id: answer for task, answer in zip(tasks, answers, strict=True)}


async def _answer(
    task: Task, rules: RolloutConfig, phases: Phases, plane: LocalPlane, http: httpx.AsyncClient
) -> GivenAnswer:
    group = {"size": 1, "task_id": task.task_id, "environment": task.environment}
    response = await http.post(f"/runs/{NAME}/groups", json=group)
    [opened] = response.raise_for_status().json()["sessions"]
    session_id = opened["session_id"]
    session = plane.run.sessions[session_id]
    work = Work(session_id)
    endpoint = Endpoint(opened["base_url"], opened["key"], "policy")
    async with limit_time("the agent ran", "session_timeout_s", rules.session_timeout_s):
        answer = await phases.run(work, task, endpoint)
    scored = await phases.score(work, task, answer)
    text = text_of_answer(session.turns[-1].message)
    return GivenAnswer(str(task.prompt), text, scored["reward"])


def main() -> None:
    import_from(user_folders())
    uri, version, *task_ids = sys.argv[1:]
    store_greedy_answers(RunDirectory(uri), int(version), task_ids)


if __name__ == "__main__":
    main()
