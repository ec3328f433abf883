"""The recipe `judge`: vLLM serves a small policy to the worker that scores; it judges what a script says."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file, save_file

from sf_core.config import PolicyConfig
from sf_core.models.builtin import make_policy, make_tokenizer
from storage.run_directory import RunDirectory
from storage.tables.judgements import read_judgements
from storage.tables.metrics import read_metrics
from storage.tables.trajectories import read_trajectories
from tests.bench.stacks.quickstart import options, read, sf


def make_judge(folder: Path) -> str:
    """A policy without sense whose replies to these questions begin with a y or an n, now more likely the one
    and now the other."""
    # vLLM's CPU build knows no narrower heads; of 29 seeds this one makes most of y and n
    make_policy(str(folder), PolicyConfig(hidden_size=64, num_layers=1), seed=28)
    weights = load_file(folder / "model.safetensors")
    letters = [make_tokenizer().convert_tokens_to_ids(letter) for letter in "yn"]
    weights["model.embed_tokens.weight"][letters] *= 3
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


# its server is in tests/sf_core/engines/vllm/test_judge_server.py, judging in tests/sf_core/agents/judges
@pytest.mark.nightly
def test_the_recipe_judges_every_answer_by_a_model_that_a_worker_serves(vllm: str, tmp_path: Path) -> None:
    small = options(
        run_id="judged",
        environment__judges__manners__model=make_judge(tmp_path / "judge"),
        policy__hidden_size=32,
        policy__num_layers=1,
        policy__warmstart="null",
        engine__kind="scripted",
        engine__script="tests.e2e.judged_package:script",
        rollout__group_size=2,
        rollout__groups_per_batch=3,
        train__iterations=2,
        evaluate__every=2,
        evaluate__num_tasks=4,
    )
    planned = sf(tmp_path, "plan", "judge", *small)
    assert planned.returncode == 0, planned.stdout + planned.stderr
    assert "the judges manners" in planned.stdout and "served by vLLM on s0; 16 calls" in planned.stdout
    before = set(psutil.pids())
    done = sf(tmp_path, "train", "judge", *small, quiet_s=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not [pid for pid in set(psutil.pids()) - before if is_vllm_of(tmp_path, pid)]
    run = RunDirectory(str(tmp_path / "runs" / "judged"))
    for number, stage, folder in (
        (0, "rollout", "trajectories"),
        (1, "rollout", "trajectories"),
        (0, "evaluate", "evaluations"),
        (2, "evaluate", "evaluations"),
    ):
        check_judged(run, number, stage, folder)
    metrics = read_metrics(run.metrics_file("train", 0))[0]
    assert metrics["judge.manners.calls"] + metrics["judge.manners.cached"] == 6
    session = sorted(rewards_of(run, 0, "rollout", "trajectories"))[0]
    assert "manners: polite {" in read("inspect", run.uri, "--session", session)
    assert "judge manners: " in read("inspect", run.uri)
    replayed = sf(tmp_path, "replay", run.uri, "--iteration", "1")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr


def is_vllm_of(folder: Path, pid: int) -> bool:
    try:
        return str(folder / "judge") in " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return False


def rewards_of(run: RunDirectory, number: int, stage: str, folder: str) -> dict[str, float]:
    """Rewards of the sessions of a rollout or an evaluation, by their ids."""
    manifest = run.read_manifest(number, stage)
    assert manifest is not None
    tables = [read_trajectories(run.path(ref.uri)) for ref in manifest.files(folder)]
    rows = [row for table in tables for row in table.select(["session_id", "reward"]).to_pylist()]
    return {row["session_id"]: row["reward"] for row in rows}


def check_judged(run: RunDirectory, number: int, stage: str, folder: str) -> None:
    """The judge was asked once about each session, whose reward is what it said."""
    manifest = run.read_manifest(number, stage)
    assert manifest is not None
    run.verify(manifest)
    assert "unjudged" not in manifest.data and not manifest.data.get("rejected")
    judged = read_judgements(run, manifest).to_pylist()
    said = {row["session_id"]: json.loads(row["verdict"])["yes"] for row in judged}
    assert len(said) == len(judged) and said == rewards_of(run, number, stage, folder)
    assert all(0 < yes < 1 for yes in said.values()) and len({*said.values()}) > 1
    for row in judged:
        assert (row["judge"], row["item"]) == ("manners", "polite")
        assert json.loads(row["messages"])[-1]["content"].startswith("Sentence: ")
        assert row["cached"] == (row["attempts"] == 0) == (row["tokens"] == 0)
