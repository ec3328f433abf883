"""Design 5.6 and invariant 9: real kills at each of the four stages lose and repeat nothing committed."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sf_core.config import RunConfig
from storage.files import read_bytes
from storage.run_directory import STAGES, RunDirectory
from tests.e2e.conftest import Cluster, manifests, wait_until

pytestmark = pytest.mark.slow

BEFORE = {
    "rollout": (0, "publish"),
    "filter": (1, "rollout"),
    "train": (1, "filter"),
    "publish": (1, "train"),
}
"""The stage whose manifest says that the key's stage of iteration 1 begins."""


def check_result(config: RunConfig) -> None:
    directory = RunDirectory(config.run_dir)
    committed = manifests(config)
    wanted = {(k, stage) for k in range(config.train.iterations) for stage in STAGES}
    assert wanted <= committed.keys()
    consumed = [
        group for k in range(config.train.iterations) for group in committed[k, "rollout"]["data"]["groups"]
    ]
    assert len(consumed) == len(set(consumed)) == config.train.iterations * config.rollout.groups_per_batch
    for k in range(config.train.iterations):
        manifest = directory.read_manifest(k, "rollout")
        assert manifest is not None
        directory.verify(manifest)
        rows = pq.ParquetFile(directory.path(manifest.outputs[0].uri)).read()
        sessions_per_group = rows.group_by("group_id").aggregate([("session_id", "count_distinct")])
        assert set(sessions_per_group["session_id_count_distinct"].to_pylist()) == {config.rollout.group_size}
        check_tokens(rows)
        # consumed lag never exceeds the bound (invariant 8)
        assert k - min(rows["min_version"].to_pylist()) <= config.lag_bound
    summary = json.loads(read_bytes(directory.path("summary.json")))
    assert summary["iterations"] == config.train.iterations


def check_tokens(rows: pa.Table) -> None:
    """Invariants 2 and 3 as stored: sampled tokens, and only they, are trained, each with its log-prob
    and version; versions never decrease along a branch."""
    for row in rows.select(
        ["loss_mask", "logprobs", "policy_versions", "turns", "shared_prefix"]
    ).to_pylist():
        sampled = [version is not None for version in row["policy_versions"]]
        assert sampled == [logprob is not None for logprob in row["logprobs"]]
        start = row["shared_prefix"]
        assert row["loss_mask"][start:] == sampled[start:]
        assert not any(row["loss_mask"][:start])
        spans = [turn for turn in row["turns"] if turn["role"] == "assistant"]
        assert sum(turn["end"] - turn["start"] for turn in spans) == sum(sampled)
        versions = [version for version in row["policy_versions"] if version is not None]
        assert versions == sorted(versions)


@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_flow_goes_on_at_the_stage_it_was_killed_in(cluster: Cluster, stage: str) -> None:
    config = cluster.config(f"flow-killed-in-{stage}")
    process = cluster.start(config)
    wait_until(lambda: BEFORE[stage] in manifests(config) or process.poll() is not None, f"start of {stage}")
    process.kill()
    process.wait()
    before = manifests(config)
    assert before and (2, "publish") not in before, cluster.log(config)[-2000:]
    cluster.finish(config, cluster.start(config))
    after = manifests(config)
    assert {key: after[key] for key in before} == before
    check_result(config)


@pytest.mark.parametrize(
    ("stage", "worker"),
    [
        ("rollout", "r0"),
        ("rollout", "a0"),
        ("rollout", "c0"),
        ("filter", "c0"),
        ("train", "t0"),
        ("publish", "c0"),
    ],
)
def test_a_killed_worker_is_replaced_and_the_run_ends_as_if_nothing_happened(
    cluster: Cluster, stage: str, worker: str
) -> None:
    config = cluster.config(f"{worker}-killed-in-{stage}")
    process = cluster.start(config)
    wait_until(lambda: BEFORE[stage] in manifests(config) or process.poll() is not None, f"start of {stage}")
    before = manifests(config)
    cluster.worker_process(worker).kill()
    cluster.finish(config, process)
    after = manifests(config)
    assert {key: after[key] for key in before} == before
    check_result(config)


def test_a_killed_data_plane_comes_back_and_the_run_goes_on(cluster: Cluster) -> None:
    config = cluster.config("dataplane-killed")
    process = cluster.start(config)
    for stage in ("rollout", "train"):
        wait_until(lambda s=stage: BEFORE[s] in manifests(config) or process.poll() is not None, stage)
        assert process.poll() is None, cluster.log(config)[-2000:]
        cluster.restart_dataplane()
    cluster.finish(config, process)
    check_result(config)


def test_a_finished_run_is_not_run_again(cluster: Cluster) -> None:
    config = cluster.config("finished")
    cluster.finish(config, cluster.start(config))
    before = manifests(config)
    cluster.finish(config, cluster.start(config))
    assert manifests(config) == before


def test_a_run_refuses_to_go_on_with_another_policy(cluster: Cluster) -> None:
    config = cluster.config("changed")
    cluster.finish(config, cluster.start(config))
    changed = cluster.config("changed", policy={"hidden_size": 64, "num_layers": 1, "warmstart": None})
    assert cluster.start(changed).wait(60) != 0
    assert "was started with another policy" in cluster.log(changed)
