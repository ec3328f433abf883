"""Which policy is served, and with which settings."""

from __future__ import annotations

from pathlib import Path

from sf_core.cli.serving.policy import policy_to_try
from sf_core.config import RunConfig
from tests.bench.policy_server import publish_run


def test_the_policy_of_a_run_is_tried_in_this_process_whatever_samples_in_the_run(tmp_path: Path) -> None:
    run = publish_run(tmp_path)
    stored = run.read_config(RunConfig)
    engine = stored.engine.model_copy(update={"kind": "vllm", "max_running": 64})
    run.write_config(stored.model_copy(update={"engine": engine}))
    named = RunConfig.model_validate({"run_id": run.run_id, "storage": {"root": str(tmp_path)}})
    policy = policy_to_try(named, tmp_path / "scratch")
    assert policy.weights.version == 3
    assert (policy.config.engine.kind, policy.config.engine.max_running) == ("torch", 8)
