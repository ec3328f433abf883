"""A small run with everything that the reader of runs shows: branches, evaluations, discarded groups, opened
sessions, and a second iteration that is not complete."""

from __future__ import annotations

from typing import Any

import numpy as np

from sf_core.config import RunConfig
from storage.files import copy_folder
from storage.run_directory import STAGES, RunDirectory
from storage.tables.metrics import write_metrics
from storage.tables.outcomes import write_outcomes
from storage.tables.schema import NOT_SAMPLED, Trajectory, TurnSpan
from storage.tables.trajectories import write_trajectories
from tests.bench.runs import commit, conversation, group_row

GIVEN = [NOT_SAMPLED] * 5


def row(session: str, versions: list[int], **changes: Any) -> Trajectory:
    """A branch with a prompt of five tokens, whose other tokens these versions sampled."""
    numbers = np.array([*GIVEN, *versions], np.int32)
    sampled = numbers != NOT_SAMPLED
    turns = [TurnSpan("user", 0, 5), TurnSpan("assistant", 5, len(numbers), "stop", "r0", 1.0, 1.0, 0)]
    known = {
        "session_id": session,
        "branch_id": f"{session}.b0",
        "token_ids": np.arange(len(numbers), dtype=np.int32) + 60,
        "loss_mask": sampled,
        "logprobs": np.where(sampled, np.float32(-0.3), np.float32("nan")),
        "policy_versions": numbers,
        "turns": turns,
        "group_id": session.rpartition(".")[0],
        "interruptions": 1,
    }
    return conversation([], **(known | changes))


FIRST = [
    row("run-1.g0.0", [0, 0, 0], reward=1.0, finished_at=1.5, output="hello"),
    row("run-1.g0.1", [0], reward=0.0, status="timeout"),
    # begins with all eight tokens of the other branch, then a message and an answer
    row(
        "run-1.g0.0",
        [0, 0, 0, NOT_SAMPLED, 1, 1],
        reward=1.0,
        finished_at=1.5,
        branch_id="run-1.g0.0.b1",
        parent_branch_id="run-1.g0.0.b0",
        shared_prefix=8,
        loss_mask=np.array([0] * 9 + [1, 1], np.bool_),
        turns=[
            TurnSpan("user", 0, 5),
            TurnSpan("assistant", 5, 8, "stop", "r0", 1.0, 1.0, 0),
            TurnSpan("tool", 8, 9),
            TurnSpan("assistant", 9, 11, "length", "t0", 0.5, 1.0, 0, 0.25),
        ],
    ),
]
TIMES = {"started_at": 100.0, "finished_at": 104.0}


def record(run: RunDirectory, start_dir: str) -> None:
    """Write the run, which starts from the policy in this folder."""
    run.write_config(RunConfig(run_id=run.run_id, seed=7))
    copy_folder(start_dir, run.start_dir)
    for version, reward in ((0, 0.25), (1, 0.75)):
        rows = [row(f"run-1.e{version}.0", [version], group_id=None, reward=reward)]
        told = {"reward_mean": reward, "sessions": 1, "failures": {}, **TIMES}
        outputs = [
            write_trajectories(run, version, rows, "part", kind="evaluations"),
            write_metrics(run, "evaluation", version, [{"reward_mean": reward, "reward_sums": reward}]),
        ]
        commit(run, version, "evaluate", outputs=outputs, data=told)
    steps = [{"loss": 0.5, "ratio_max": 1.0, "kl": 1.0}, {"loss": 1.5, "ratio_max": 3.0}]
    told = {"reward_mean": 0.5, "sessions": 2, "sampled_tokens": 6, "failures": {"timeout": 1}, **TIMES}
    outcomes = write_outcomes(run, 0, [group_row(1, [1.0, 0.5], verdict="equal_rewards")], "rollout-1")
    outputs = [write_trajectories(run, 0, FIRST, "part"), outcomes]
    rejected = {"1": "equal_rewards", "2": "max_lag"}
    commit(run, 0, "rollout", outputs=outputs, data=told | {"rejected": rejected})
    write_metrics(run, "train", 0, steps)
    for stage in STAGES[1:]:
        commit(run, 0, stage, data=TIMES | {"finished_at": 110.0})
    # not committed yet, so no part of the run
    write_metrics(run, "train", 1, steps)
    second = write_trajectories(run, 1, [row("run-1.g3.0", [0, 1], reward=1.0)], "part")
    commit(run, 1, "rollout", outputs=[second], data=told | {"reward_mean": 1.0, "failures": {}})
    write_trajectories(run, 1, [row("run-1.open.0", [1], group_id=None)], "part", kind="opened")
