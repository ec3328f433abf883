"""The built-in policy learns to mend functions: rewards of tests, in the sandbox, by tools."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sf_core.stages.preflight.stored_config import read_stored_config
from tests.bench import ROOT, stacks
from tests.bench.sandboxes import need_sandbox

CONFIG = str(ROOT / "configs" / "repair.yaml")


@pytest.mark.nightly
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", range(3))
def test_it_learns_with_any_seed(cluster: stacks.cluster.Cluster, tmp_path: Path, seed: int) -> None:
    """The standard error of a difference of means over 128 tasks is at most 0.06."""
    need_sandbox()
    settings = stacks.quickstart.options(run_id=f"repair-{seed}", seed=seed)
    done = stacks.quickstart.sf(tmp_path, "train", CONFIG, *settings, on=cluster.services, quiet_s=1400)
    assert done.returncode == 0, done.stdout + done.stderr
    config = read_stored_config(str(tmp_path / "runs" / f"repair-{seed}"))
    before, after = stacks.invariants.held_out(config)
    assert after - before >= 0.3
    stacks.invariants.check_result(config)
    stacks.invariants.check_nothing_lost(config)
    last = stacks.invariants.trajectories(config, config.train.iterations - 1)
    called = {
        call["function"]["name"]
        for messages in last["messages"].to_pylist()
        for message in json.loads(messages)
        for call in message.get("tool_calls", [])
    }
    assert {"edit", "check"} <= called
