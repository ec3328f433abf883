"""Bits of a new version that flip after they were written: engines serve on, and the run says what it was."""

from __future__ import annotations

from pathlib import Path
from subprocess import Popen

import pytest

from sf_core.config import RunConfig
from storage.run_directory import RunDirectory
from tests.bench import stacks
from tests.bench.stacks import invariants
from tests.bench.waits import wait_until

pytestmark = pytest.mark.nightly


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)


def damage_before_it_is_published(
    cluster: stacks.cluster.Cluster, config: RunConfig, flow: Popen[bytes], iteration: int, name: str
) -> Path:
    """Flip a bit of this file of the version that an iteration makes; returns the file."""
    seat = Path(config.run_dir, "gangs", f"{iteration:05d}", "1.0", "rank-0")
    wait_until(lambda: seat.exists() or flow.poll() is not None, f"training of iteration {iteration}")
    publisher = cluster.worker_process("c0")
    publisher.suspend()
    try:
        what = f"weights of iteration {iteration}"
        wait_until(
            lambda: stacks.cluster.is_committed(config, iteration, "train") or flow.poll() is not None, what
        )
        assert not stacks.cluster.is_committed(config, iteration, "publish"), cluster.log(config)[-2000:]
        file = Path(RunDirectory(config.run_dir).weights_dir(iteration + 1), name)
        flip_a_bit(file)
    finally:
        publisher.resume()
    return file


def test_weights_that_were_damaged_are_refused_and_a_damaged_delta_is_not_needed(
    cluster: stacks.cluster.Cluster,
) -> None:
    config = cluster.config(
        "damaged-weights",
        "async",
        policy={"hidden_size": 32, "num_layers": 1, "warmstart": None, "dtype": "bfloat16"},
        engine={"kind": "torch", "script": None, "context_length": 128},
        evaluate={"every": 1000},
    )
    process = cluster.start(config)
    full = damage_before_it_is_published(cluster, config, process, 0, "model.safetensors")
    # version 2 is whole, and its delta is of no use to an engine that has version 0
    delta = damage_before_it_is_published(cluster, config, process, 2, "delta.safetensors")
    cluster.finish(config, process)
    published = [invariants.manifests(config)[k, "publish"]["data"]["engines"] for k in range(3)]
    assert [set(engines.values()) for engines in published] == [{0}, {2}, {3}]
    logs = {path.name: path.read_text(encoding="utf-8") for path in (cluster.folder / "logs").glob("*.log")}
    refused = f"still uses version 0, because it refuses version 1: {full}: the tensors differ from those"
    assert [name for name, text in logs.items() if refused in text] == ["worker-c0.log"]
    assert f"{delta}: the content differs from what was written; all of the weights" in logs["worker-r0.log"]
    # the stored files are checked too
    for file in (full, delta):
        flip_a_bit(file)
    invariants.check_result(config)
