"""Tokens and iterations that curricula and gates take to a held-out reward of 0.8 on live tasks, among tasks
that teach nothing (benchmarks/recipe_tasks.py). Baseline in the same run: `uniform`, each task of the pool
once, then again.

Every run has a pool of 256 tasks, 16 groups of 8 sessions, the lag bound 1, the warm start of its seed, and
at most 100 iterations; it is ended by the evaluation that reaches the goal. All sampled tokens count: those
of dropped groups too, not those of evaluations. A run without the goal counts with all its tokens and
iterations, and is marked. Ratios are geometric means over paired seeds, with the 95 % interval of Student's t
over the logarithms. benchmarks/curriculum_claims.py has what was predicted before the first run.

    python -m benchmarks.curricula --lines runs.jsonl     goes on with those of the file; some 3 hours for all
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.curriculum_claims import DOSES, PLAN, RECIPES, Cell, Measured, summary
from benchmarks.recipe_tasks import RecipeTasks
from benchmarks.results import ROOT, commit_of
from sf_core.agents.runner import first_index
from sf_core.cli.stack.local import Services, local_stack, start_services
from sf_core.cli.stack.processes import Part
from sf_core.cli.stack.supervisor import Supervisor
from sf_core.config import RunConfig
from sf_core.config.validation import validate_config
from sf_core.config.yaml_file import merge_sections
from sf_core.reports.view import RunView
from sf_core.scheduling.timeline import Span, read_spans
from sf_core.stages.start import warm_policy
from storage.run_directory import RunDirectory
from storage.tables.outcomes import read_outcomes

GOAL = 0.8
SEEDS = (0, 1, 2, 3)
ITERATIONS = 100
EVERY = 4
HELD_OUT = 640
MAX_TOKENS = 7
"""The longest answer of a live task and its end, so that impossible ones cost no more. Hard ones take 11."""

LEARNING_RATE = 2.5e-4
"""Rate at which uniform takes some 50 iterations at the dose .5/.1/0, and some 35 at 0/0/0, with seed 0."""

RUN_TIMEOUT_S = 7200.0
FREED_S = 30.0


def main(
    seed: Annotated[list[int], typer.Option()] = list(SEEDS),  # noqa: B006
    lines: Annotated[Path | None, typer.Option(help="a JSON line for each run; those there are kept")] = None,
    part: Annotated[list[int] | None, typer.Option(help="lines of PLAN, from 0; all by default")] = None,
    iterations: int = ITERATIONS,
) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        lines = lines or folder / "runs.jsonl"
        found = {run.key: run for run in read_lines(lines)}
        planned = [(cell, number) for cells in chosen(part) for number in seed for cell in cells]
        todo = [(cell, number) for cell, number in planned if (*cell, number) not in found]
        if todo:
            lines.parent.mkdir(parents=True, exist_ok=True)
            commit = commit_of(ROOT)
            env = {"PREFECT_HOME": str(folder / "prefect"), "PYTHONPATH": str(Path.cwd())}
            with local_stack(folder / "logs", env) as stack:
                services = start_services(stack, folder, RunConfig().cluster.workers)()
                stack.stop_s = FREED_S
                for cell, number in todo:
                    config = run_config(cell, number, iterations, folder, services)
                    began = time.monotonic()
                    run_to_goal(config, folder, stack, services)
                    run = measure(config, cell, time.monotonic() - began, commit)
                    found[run.key] = run
                    with lines.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(asdict(run)) + "\n")
                    print(json.dumps(asdict(run)), flush=True)
    print(json.dumps({"goal": GOAL, "seeds": seed} | summary(list(found.values()))))


def chosen(part: Sequence[int] | None) -> Iterator[tuple[Cell, ...]]:
    return (cells for number, cells in enumerate(PLAN) if part is None or number in part)


def read_lines(file: Path) -> list[Measured]:
    """Runs of a file; none if there is no file."""
    found = (
        [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
    )
    rewards = ({name: _by_version(run[name]) for name in ("live", "easy")} for run in found)
    return [Measured(**{**run, **by_version}) for run, by_version in zip(found, rewards, strict=True)]


def _by_version(rewards: dict[str, float]) -> dict[int, float]:
    return {int(version): reward for version, reward in rewards.items()}


def run_config(cell: Cell, seed: int, iterations: int, folder: Path, services: Services) -> RunConfig:
    told = DOSES[cell.dose].get("tells_others", False)
    environment = {"name": "benchmarks.recipe_tasks:RecipeTasks", "settings": DOSES[cell.dose]}
    settings = {
        "run_id": f"run-{list(DOSES).index(cell.dose)}-{list(RECIPES).index(cell.recipe)}-{seed}",
        "seed": seed,
        "policy": {"model": str(warm_policy(warm_config(seed))), "warmstart": None, "dtype": "float32"},
        "environment": environment,
        "rollout": {
            "group_size": 8,
            "groups_per_batch": 16,
            "max_tokens": MAX_TOKENS,
            "success": {"part": "told" if told else "answer"},
        },
        "train": {"iterations": iterations, "learning_rate": LEARNING_RATE},
        "evaluate": {"every": EVERY, "num_tasks": HELD_OUT},
        "engine": {"context_length": 64},
        "cluster": {"scheduler": services.scheduler},
        "dataplane": {"url": services.dataplane},
        "storage": {"root": str(folder)},
    }
    return validate_config(merge_sections(settings, {"rollout": RECIPES[cell.recipe]}))


def warm_config(seed: int) -> RunConfig:
    """The start of all runs of a seed, cached among those of other runs."""
    return validate_config(
        {
            "seed": seed,
            "policy": {
                "hidden_size": 64,
                "warmstart": {
                    "steps": 800,
                    "batch_size": 64,
                    "learning_rate": 0.005,
                    "label_smoothing": 0.0,
                },
            },
            "environment": {"name": "benchmarks.recipe_tasks:RecipeTasks"},
        }
    )


def run_to_goal(config: RunConfig, folder: Path, stack: Supervisor, services: Services) -> None:
    """Run the flow to the evaluation that reaches the goal, or to its end."""
    file = folder / f"{config.run_id}.json"
    file.write_text(config.model_dump_json(), encoding="utf-8")
    part = f"flow-{config.run_id}"
    # nothing of it stays: the flow frees the workers when it is ended
    command = [sys.executable, "-m", "flows.train", str(file)]
    [flow] = stack.start(Part(part, command, services.addresses, once=True))
    deadline = time.monotonic() + RUN_TIMEOUT_S
    try:
        while (code := flow.code()) is None and not has_reached(config):
            if time.monotonic() > deadline:
                raise SystemExit(f"{config.run_id} still runs after {RUN_TIMEOUT_S:.0f} s: {flow.tail(20)}")
            time.sleep(0.5)
        if code:
            raise SystemExit(f"{config.run_id} failed: {flow.tail(20)}")
    finally:
        stack.remove(flow)


def has_reached(config: RunConfig) -> bool:
    rewards = held_out(RunView(RunDirectory(config.run_dir)), config.train.iterations, "live")
    return bool(rewards) and max(rewards.values()) >= GOAL


def held_out(view: RunView, iterations: int, kind: str) -> dict[int, float]:
    """Mean held-out rewards of tasks of this kind by version."""
    found = ((version, view.manifest(version, "evaluate")) for version in range(0, iterations + 1))
    return {version: manifest.data["by_environment"][kind] for version, manifest in found if manifest}


def measure(config: RunConfig, cell: Cell, seconds: float, commit: str) -> Measured:
    run = RunDirectory(config.run_dir)
    view = RunView(run)
    live, easy = (held_out(view, config.train.iterations, kind) for kind in ("live", "easy"))
    passed = find_goal(live)
    if passed is None:
        iterations = float(view.progress().published)
        tokens = tokens_until(view, round(iterations))
    else:
        before, after, share = passed
        iterations = before + share * (after - before)
        first = tokens_until(view, before)
        last = tokens_until(view, after)
        tokens = first + share * (last - first)
    rows = list(read_outcomes(run, math.ceil(iterations)))
    return Measured(
        dose=cell.dose,
        recipe=cell.recipe,
        seed=config.seed,
        reached=passed is not None,
        tokens=round(tokens),
        iterations=round(iterations, 2),
        live={version: round(reward, 3) for version, reward in live.items()},
        easy={version: round(reward, 3) for version, reward in easy.items()},
        token_shares=token_shares(rows, RecipeTasks(**DOSES[cell.dose]), first_index(config.seed)),
        groups=dict(Counter(verdict_of(row["rewards"]) for row in rows)),
        seconds=round(seconds, 1),
        commit=commit,
    )


def find_goal(rewards: dict[int, float]) -> tuple[int, int, float] | None:
    """The evaluated versions between which the goal is reached, and its share of the way; None if it is
    not."""
    before = 0
    low = rewards[0]
    for version, reward in sorted(rewards.items()):
        if reward >= GOAL:
            return before, version, (GOAL - low) / (reward - low) if reward > low else 1.0
        before = version
        low = reward
    return None


def tokens_until(view: RunView, version: int) -> float:
    """Tokens sampled until this version was published, without those of evaluations, which have ended by
    then: each is part of a batch before."""
    if version == 0:
        return 0.0
    published = view.manifest(version - 1, "publish")
    assert published is not None
    until = published.data["finished_at"]
    measured = filter(None, (view.manifest(earlier, "evaluate") for earlier in range(version)))
    sampled = sum(_tokens_before(span, until) for span in read_spans(view.run))
    return sampled - sum(manifest.data["sampled_tokens"] for manifest in measured)


def _tokens_before(span: Span, until: float) -> float:
    share = (until - span.start) / max(span.end - span.start, 1e-9)
    return span.tokens * min(max(share, 0.0), 1.0)


def token_shares(rows: Sequence[dict[str, Any]], tasks: RecipeTasks, first: int) -> dict[str, float]:
    tokens: Counter[str] = Counter()
    for row in rows:
        tokens[tasks.kind(first + row["task_index"])] += sum(row["tokens"])
    return {kind: round(count / max(tokens.total(), 1), 3) for kind, count in sorted(tokens.items())}


def verdict_of(rewards: Sequence[float]) -> str:
    right = sum(reward >= 1 for reward in rewards)
    return "all right" if right == len(rewards) else "mixed" if right else "all wrong"


if __name__ == "__main__":
    typer.run(main)
