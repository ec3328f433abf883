"""Runs that choose what they sample and keep lose and repeat nothing to real kills."""

from __future__ import annotations

from typing import Any

import pytest

from storage.run_directory import RunDirectory
from storage.tables.outcomes import read_outcomes
from tests.bench.stacks.cluster import Cluster, await_stage
from tests.bench.stacks.invariants import check_result

CHOOSING: dict[str, Any] = {
    "success": {"part": "correct"},
    "gate": {"kind": "mixed", "least": 1},
    "spare_sessions": 1,
    "group_size": 4,
    "groups_per_batch": 3,
    "curriculum": {
        "pool": 20,
        "solved": 0.0,
        "floor": 0.05,
        "stages": [{"shares": {"low": 1}, "until": 1}, {"shares": {"low": 1, "high": 1}}],
    },
}


# kills are in test_resume.py, choices in tests/sf_core/dataplane/runs/test_curriculum_replay.py
@pytest.mark.nightly
def test_what_is_killed_in_the_second_stage_leaves_every_group_told_once(cluster: Cluster) -> None:
    none = dict.fromkeys(("tasks", "agent", "reward"))
    environment = {"name": "tests.e2e.parts_package:Echoes", **none}
    config = cluster.config("choosing", environment=environment, rollout=CHOOSING, train={"iterations": 5})
    process = cluster.start(config)
    for iteration, stage, killed in (
        (2, "rollout", "dataplane"),
        (3, "rollout", "a0"),
        (3, "train", "dataplane"),
        (4, "rollout", "flow"),
    ):
        await_stage(cluster, config, process, iteration, stage)
        if killed == "dataplane":
            cluster.restart_dataplane()
        elif killed == "flow":
            process.kill()
            process.wait()
            process = cluster.start(config)
        else:
            cluster.worker_process(killed).kill()
    cluster.finish(config, process)
    check_result(config)
    rows = list(read_outcomes(RunDirectory(config.run_dir), config.train.iterations))
    sealed = [row for row in rows if row["verdict"] == "sealed"]
    assert {row["source"] for row in rows if row["number"] < 3} == {"low"}
    assert {row["source"] for row in rows} == {"low", "high"}, "the second stage was reached"
    assert {len(row["scores"]) for row in sealed} == {config.rollout.group_size}
    assert all(0 < sum(score >= 1 for score in row["scores"]) < 4 for row in sealed), "the gate let it pass"
    assert any(row["verdict"] == "not_mixed" for row in rows)
