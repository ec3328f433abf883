"""Which policy is served, and with which settings."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from sf_core.cli.serving.policy import open_stored, policy_to_try
from sf_core.config import PolicyConfig, RunConfig
from sf_core.models.builtin import make_policy
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


def test_a_multimodal_policy_is_served_by_an_engine_that_shows_it_images(tmp_path: Path) -> None:
    run = publish_run(tmp_path)
    make_policy(run.start_dir, PolicyConfig(sees=True, hidden_size=32, num_layers=1), seed=0)
    shutil.copy(Path(run.start_dir, "model.safetensors"), run.weights_dir(3))
    told = (
        f"the policy of run {run.run_id} sees images, but this engine does not support images: use "
        f"--engine vllm"
    )
    with pytest.raises(ValueError, match=re.escape(told)):
        open_stored(run.uri, None, "torch")
    stored = run.read_config(RunConfig)
    run.write_config(stored.model_copy(update={"engine": stored.engine.model_copy(update={"kind": "vllm"})}))
    named = RunConfig.model_validate({"run_id": run.run_id, "storage": {"root": str(tmp_path)}})
    assert policy_to_try(named, tmp_path / "scratch").config.engine.kind == "vllm"
