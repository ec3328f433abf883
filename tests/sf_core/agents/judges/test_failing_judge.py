"""A judge that fails three calls in ten, is slow, says nothing, dies and comes back, and workers and a data
plane that are killed meanwhile: no group is lost, nothing counts 0, and every judgement counts once."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from sf_core.cli.stack.local import free_port
from sf_core.config import RolloutConfig
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.types import Endpoint, Task
from storage.files import FileRef
from storage.manifests import Manifest
from storage.run_directory import RunDirectory
from storage.tables.judgements import read_judgements
from tests import bench
from tests.bench.waits import wait_until
from tests.sf_core.agents.judges.scorer import scorer_process


async def ask_patiently(task: Task, endpoint: Endpoint) -> str:
    """An agent whose client sends a request again as long as the data plane is away."""
    async with endpoint.client().with_options(max_retries=100) as client:
        messages: Any = [{"role": "user", "content": task.prompt}]
        answer = await client.chat.completions.create(model="policy", messages=messages)
    return answer.choices[0].message.content or ""


FAULTS: list[str | int] = [503, "", "garbage", "", "", "broken", "", "", "slow", ""]
NUM_TASKS = 24
GROUPS = 12
SIZE = 2


@pytest.mark.system
def test_a_judge_that_fails_costs_no_group_and_no_reward(
    tmp_path: Path, model_dir: str, renderer: Renderer
) -> None:
    with ExitStack() as stack:
        restarts = bench.dataplane.restarts.Restarts(tmp_path, model_dir)
        stack.callback(restarts.kill)
        restarts.start()
        plane = restarts.plane
        rules = {"group_size": SIZE, "groups_per_batch": GROUPS, "session_attempts": 20}
        plane.register(scored_apart=True, lag_bound=0, num_batches=1, **rules)
        plane.connect(lambda prompt, seed: bench.dataplane.planes.say(renderer, "x"))
        plane.post("/runs/run/evaluations/0", {"num_tasks": NUM_TASKS})
        bench.dataplane.served_runs.run_runner(
            plane, "a0", "agent", rules=RolloutConfig(concurrency=4), agent=ask_patiently
        )
        port = free_port()
        judge_url = f"http://127.0.0.1:{port}/v1"

        def num_finished() -> int:
            evaluation = plane.get("/runs/run/evaluations/0")
            return int(evaluation["finished"])

        def is_ready() -> bool:
            return bool(plane.get("/runs/run/batches/0")["ready"])

        with scorer_process(plane.url, "s0", judge_url) as scorer:
            with bench.judge_server.judge_process(port, *FAULTS):
                wait_until(lambda: num_finished() > 4)
            # the judge was killed: answers come back unjudged
            told = plane.get("/runs/run")["counters"].get("unjudged", 0)
            wait_until(lambda: plane.get("/runs/run")["counters"].get("unjudged", 0) > told)
            restarts.restart()
            with bench.judge_server.judge_process(port, *FAULTS):
                before = num_finished()
                wait_until(lambda: num_finished() > before)
                scorer.kill()
        with bench.judge_server.judge_process(port, *FAULTS), scorer_process(plane.url, "s1", judge_url):
            wait_until(lambda: num_finished() == NUM_TASKS and is_ready())
            restarts.restart()
            wait_until(is_ready)
            evaluated = plane.post("/runs/run/evaluations/0/seal", {"attempt": 1})
            sealed = plane.post("/runs/run/batches/0/seal", {"attempt": 1})
            counters = plane.get("/runs/run")["counters"]
            plane.post("/runs/run/release")
    assert sealed["rejected"] == {}
    assert sealed["failures"] == evaluated["failures"] == sealed["discarded"] == {}
    assert not counters.get("failed_sessions")
    assert "unjudged" not in evaluated
    check_rows(plane.run_dir / "run", sealed, GROUPS * SIZE)
    check_rows(plane.run_dir / "run", evaluated, NUM_TASKS)


def check_rows(folder: Path, answer: dict[str, Any], num_sessions: int) -> None:
    directory = RunDirectory(str(folder))
    [file] = answer["files"]
    rewards = {
        row["session_id"]: row["reward"] for row in pq.read_table(directory.path(file["uri"])).to_pylist()
    }
    files = [FileRef(**ref) for ref in answer["judgements"]]
    manifest = Manifest(run_id="run", iteration=0, stage="rollout", attempt=1, outputs=files)
    rows = read_judgements(directory, manifest).to_pylist()
    judged = Counter(row["session_id"] for row in rows if row["verdict"] is not None)
    assert judged == dict.fromkeys(rewards, 1), "each of its judgements counts once"
    assert len(rewards) == num_sessions
    assert min(rewards.values()) >= 1.0
    marks = {row["session_id"]: 1.0 + float(row["verdict"]) for row in rows if row["verdict"] is not None}
    assert rewards == marks
    figures = answer["judges"]["taste"]
    assert figures["tokens"] == sum(row["tokens"] for row in rows)
    assert figures["unread"] == sum(row["reply"] == "as an AI" for row in rows)
