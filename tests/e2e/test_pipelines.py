"""Pipelines on one cluster of a rollout worker and a trainer that could roll out too."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import Cluster, holders, overlap_s, spans
from tests.e2e.invariants import check_result

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("pipeline", "sampling"),
    [("disaggregated", {"r0"}), ("async", {"r0"}), ("multiplexed", {"r0", "t0"})],
)
def test_a_pipeline_says_who_samples_and_whether_training_is_waited_for(
    cluster: Cluster, pipeline: str, sampling: set[str]
) -> None:
    config = cluster.config(pipeline, pipeline, train={"iterations": 2})
    cluster.finish(config, cluster.start(config))
    check_result(config)
    assert holders(config, "rollout") == sampling
    assert holders(config, "train") == {"t0"}
    if not config.overlap:
        assert overlap_s(spans(config, "rollout"), spans(config, "train")) <= 0
