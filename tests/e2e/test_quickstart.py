"""The quickstart learns, and its records are exact: the real engine, the real trainer, agents over HTTP,
tools, a device that is lent."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from transformers import AutoTokenizer

from seamlessflow import open_run
from sf_core.config import RunConfig
from sf_core.environments.quickstart import TOOLS
from sf_core.stages.preflight.stored_config import read_stored_config
from storage.run_directory import RunDirectory
from tests.bench import stacks
from tests.bench.notebooks import execute
from tests.e2e.recomputed import Policies

# the first of them trains the quickstart, which takes two minutes on a quiet machine

ROWS_RECOMPUTED = 32
"""Number of rows recomputed in every batch."""


def num_answers(rows: pa.Table) -> list[int]:
    return [sum(turn["role"] == "assistant" for turn in turns) for turns in rows["turns"].to_pylist()]


def check_reading(run_dir: str) -> None:
    """Check what the public reader gives of a run that is over against its files."""
    run = open_run(run_dir)
    config = read_stored_config(run_dir)
    iterations = run.iterations().to_pylist()
    evaluations = run.evaluations().to_pylist()
    assert len(iterations) == config.train.iterations and all(one["published"] for one in iterations)
    for one in iterations:
        number = one["iteration"]
        rows = stacks.invariants.trajectories(config, number)
        assert one["sampled_tokens"] == pc.sum(pc.list_flatten(rows["loss_mask"])).as_py()
        assert one["sessions"] == len(pc.unique(rows["session_id"]))
    held_out = {one["version"]: one["reward"] for one in evaluations}
    assert iterations[-1]["held_out"] == held_out[config.train.iterations] > held_out[0]

    sessions = run.sessions(["iteration", "kind", "session_id", "answers", "tokens", "reward"]).to_pylist()
    training = [one for one in sessions if one["kind"] == "training"]
    sampled = Counter[int]()
    for one in training:
        sampled[one["iteration"]] += one["tokens"]
    assert [sampled[one["iteration"]] for one in iterations] == [one["sampled_tokens"] for one in iterations]
    assert sum(run.groups()["sessions"].to_pylist()) == len(training)

    last = stacks.invariants.trajectories(config, config.train.iterations - 1)
    decode = AutoTokenizer.from_pretrained(run.uri + "/policy").decode
    answers = {one["session_id"]: one["answers"] for one in training}
    for row, expected in zip(last.slice(0, 8).to_pylist(), num_answers(last), strict=False):
        turns = run.session(row["session_id"]).to_pylist()
        for name in ("token_ids", "logprobs", "policy_versions", "loss_mask"):
            assert [value for turn in turns for value in turn[name]] == row[name]
        assert all(turn["text"] == decode(turn["token_ids"]) for turn in turns)
        assert answers[row["session_id"]] == expected


def test_it_learns(quickstart: RunConfig) -> None:
    """The standard error of a mean over 256 tasks is at most 0.03, that of a difference 0.045; twelve
    iterations are worth about 0.35: chance neither makes nor hides a rise of 0.15."""
    before, after = stacks.invariants.held_out(quickstart)
    assert after - before >= 0.15


def test_it_is_read_as_it_is_stored(quickstart: RunConfig) -> None:
    check_reading(quickstart.run_dir)


def test_a_notebook_reads_it(quickstart: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "quickstart").symlink_to(quickstart.run_dir)
    slower = RunConfig.model_validate({"run_id": "slower", "train": {"learning_rate": 0.0003}})
    RunDirectory(str(tmp_path / "runs" / "slower")).write_config(slower)
    _, _, ranked, turns, *_, settings = execute("read_a_run.ipynb", tmp_path)
    assert "quickstart.g" in ranked and "assistant" in turns and "train.iterations" in settings


def test_its_batches_are_whole_and_exact(quickstart: RunConfig) -> None:
    stacks.invariants.check_result(quickstart)
    stacks.invariants.check_nothing_lost(quickstart)
    rows = pa.concat_tables(
        stacks.invariants.trajectories(quickstart, k) for k in range(quickstart.train.iterations)
    )
    # tools were called, and devices taken with requests on them
    interrupted = np.array(rows["interruptions"]) > 0
    tools = np.array(num_answers(rows)) > 1
    assert (interrupted & tools).any() and (interrupted & ~tools).any()
    assert (np.array(rows["min_version"]) < np.array(rows["max_version"])).any()


def test_every_sampled_token_has_the_log_prob_that_its_policy_version_gives_it(quickstart: RunConfig) -> None:
    """Recomputed with the published weights from the exported ids: they are those that the engine saw."""
    policies = Policies(RunDirectory(quickstart.run_dir))
    for k in range(quickstart.train.iterations):
        rows = stacks.invariants.trajectories(quickstart, k)
        answers = pa.array(num_answers(rows))
        most_telling = pc.sort_indices(
            rows.append_column("answers", answers),
            sort_keys=[
                ("interruptions", "descending"),
                ("min_version", "ascending"),
                ("answers", "descending"),
            ],
        )
        assert policies.largest_difference(rows.take(most_telling[:ROWS_RECOMPUTED])) < 1e-4


def test_conversations_rendered_again_give_the_exported_ids(quickstart: RunConfig) -> None:
    """All but those with special tokens in the middle of an answer, which no text has."""
    tokenizer = AutoTokenizer.from_pretrained(RunDirectory(quickstart.run_dir).start_dir)
    rows = stacks.invariants.trajectories(quickstart, quickstart.train.iterations - 1)
    equal = []
    for row in rows.to_pylist():
        tools = [tool.schema for tool in TOOLS[row["environment"]]]
        text = tokenizer.apply_chat_template(json.loads(row["messages"]), tools=tools or None, tokenize=False)
        ids = tokenizer.encode(text, add_special_tokens=False)
        equal.append(ids[: len(row["token_ids"])] == row["token_ids"])
    assert np.mean(equal) > 0.8
    assert any(same for same, answers in zip(equal, num_answers(rows), strict=True) if answers > 1)


def test_devices_sample_while_others_train(quickstart: RunConfig) -> None:
    assert stacks.cluster.holders(quickstart, "rollout") == {"r0", "t0"}
    assert stacks.cluster.holders(quickstart, "train") == {"t0"}
    steps = stacks.cluster.spans(quickstart, "train")
    sampling = stacks.cluster.spans(quickstart, "rollout", on="r0")
    assert stacks.cluster.overlap_s(sampling, steps) > 0
    # who only samples is held once, to the end: training takes nothing from it. Its process gives way to
    # others, and on a busy machine begins when the first steps are over
    [held] = stacks.cluster.spans(quickstart, "rollout", "held", on="r0")
    assert steps[-1].end < held.end


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(3))
def test_the_whole_of_it_learns_with_any_seed(
    cluster: stacks.cluster.Cluster, tmp_path: Path, seed: int
) -> None:
    settings = stacks.quickstart.options(run_id=f"seed-{seed}", seed=seed)
    done = stacks.quickstart.sf(
        tmp_path, "train", stacks.quickstart.CONFIG, *settings, on=cluster.services, quiet_s=840
    )
    assert done.returncode == 0, done.stdout + done.stderr
    config = read_stored_config(str(tmp_path / "runs" / f"seed-{seed}"))
    before, after = stacks.invariants.held_out(config)
    assert after - before >= 0.35 and after >= 0.80
    stacks.invariants.check_result(config)
    stacks.invariants.check_nothing_lost(config)
