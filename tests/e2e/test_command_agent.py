"""A run whose agent is a command: a script without any SDK, started for each session by the agent worker."""

from __future__ import annotations

import sys

import psutil
import pytest

from sf_core.config.rollout_config import REASONS
from tests.bench import stacks
from tests.bench.stacks import invariants
from tests.bench.stacks.cluster import Cluster


# sessions of scripts are in tests/sf_core/agents/test_command_sessions.py
@pytest.mark.nightly
def test_a_script_trains_the_built_in_policy_and_what_it_wrote_is_shown(cluster: Cluster) -> None:
    script = cluster.folder / "ask.py"
    script.write_text(stacks.echo_package.ASK, encoding="utf-8")
    config = cluster.config(
        "command-agent",
        environment={"agent": {"command": [sys.executable, str(script)], "timeout_s": 100}},
        engine={"kind": "torch", "script": None},
        train={"iterations": 2},
        evaluate={"every": 2, "num_tasks": 2},
    )
    cluster.finish(config, cluster.start(config))
    invariants.check_result(config)
    rows = invariants.trajectories(config, 1).to_pylist()
    assert len(rows) == 6 and not {row["status"] for row in rows} & {*REASONS}
    # the answer on one line, or more if the policy says so, and what went to standard error
    assert all("asked\n" in row["output"] for row in rows)
    shown = stacks.quickstart.read("inspect", config.run_dir, "--session", rows[0]["session_id"])
    _, wrote = shown.split("what the command wrote\n")
    assert "asked" in wrote.splitlines()
    left = [p for p in psutil.process_iter(["cmdline"]) if str(script) in (p.info["cmdline"] or ())]
    assert left == []
