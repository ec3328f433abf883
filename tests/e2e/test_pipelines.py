"""Pipelines on a cluster of a rollout worker and a trainer that can roll out too. The multiplexed one is the
quickstart's (test_quickstart.py)."""

from __future__ import annotations

import pytest

from tests.bench import stacks
from tests.bench.waits import patience
from tests.e2e.paced_package import GROUPS_PER_BATCH

PACED = {
    "environment": {part: f"tests.e2e.paced_package:{part}" for part in ("tasks", "agent", "reward")},
    "rollout": {"groups_per_batch": GROUPS_PER_BATCH},
    "train": {"iterations": 2},
    "engine": {"kind": "emulated"},
    # 10 ms for a token of all requests, two seconds for a step of training; more where sessions begin late
    "emulation": {
        "parameters": 1e9,
        "memory_bandwidth": 2e11,
        **dict.fromkeys(("write_bandwidth", "verify_bandwidth", "load_bandwidth"), 4e10),
        "peak_flops": 5e12 / patience(1.0),
        "utilisation": 0.4,
    },
}


@pytest.mark.parametrize("pipeline", [pytest.param("disaggregated", marks=pytest.mark.nightly), "async"])
def test_a_pipeline_says_who_samples_and_whether_training_is_waited_for(
    cluster: stacks.cluster.Cluster, pipeline: str
) -> None:
    config = cluster.config(pipeline, pipeline, **PACED)
    cluster.finish(config, cluster.start(config))
    stacks.invariants.check_result(config)
    stacks.invariants.check_nothing_lost(config)
    assert any(stacks.invariants.trajectories(config, 0)["shared_prefix"].to_pylist())
    assert stacks.cluster.holders(config, "rollout") == {"r0"}
    assert stacks.cluster.holders(config, "train") == {"t0"}
    # the second batch is there to be sampled as long as the first is trained on
    assert (
        stacks.cluster.overlap_s(
            stacks.cluster.spans(config, "rollout"), stacks.cluster.spans(config, "train")
        )
        > 0
    ) == config.overlap
