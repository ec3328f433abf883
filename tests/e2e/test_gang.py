"""Two lent trainers train together: undisturbed, with one killed, with one that hangs."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sf_core.config import RunConfig
from tests.e2e.conftest import Cluster, holders, is_committed, overlap_s, spans
from tests.e2e.invariants import check_result, manifests
from tests.e2e.test_joining import connected, end_worker, restored, start_worker
from tests.patience import wait_until


@pytest.fixture(scope="module")
def colocated(cluster: Cluster) -> Iterator[Cluster]:
    """Cluster with two trainers, t0 and t1, and no worker that only samples."""
    with restored(cluster):
        end_worker(cluster, "r0")
        start_worker(cluster, "t1", "rollout", "train")
        wait_until(lambda: connected(cluster) == {"t0", "t1", "a0", "c0"}, "the workers", every_s=0.2)
        yield cluster


def gang_config(cluster: Cluster, run_id: str, **train: Any) -> RunConfig:
    return cluster.config(run_id, train={"iterations": 3, "workers": 2, "gang_timeout_s": 15, **train})


def ranks(config: RunConfig) -> list[int]:
    """Number of ranks that trained each iteration."""
    committed = manifests(config)
    return [committed[k, "train"]["data"]["ranks"] for k in range(config.train.iterations)]


def seats(config: RunConfig, iteration: int, epoch: int = 0) -> Path:
    return Path(config.run_dir) / "gangs" / f"{iteration:05d}" / f"1.{epoch}"


def await_ranks(process: subprocess.Popen[bytes], config: RunConfig, iteration: int) -> None:
    """Wait until both ranks have begun this train stage."""
    folder = seats(config, iteration)
    wait_until(
        lambda: all((folder / f"rank-{rank}").exists() for rank in (0, 1)) or process.poll() is not None,
        f"ranks of iteration {iteration}",
    )


def kill_rank(cluster: Cluster, config: RunConfig, process: subprocess.Popen[bytes], killed: str) -> None:
    """kill -9 of a worker when both ranks of iteration 1 have begun and none is through."""
    wait_until(lambda: is_committed(config, 0, "publish") or process.poll() is not None, "iteration 0")
    workers = {name: cluster.worker_process(name) for name in ("t0", "t1")}
    await_ranks(process, config, 1)
    for worker in workers.values():
        worker.suspend()
    assert (1, "train") not in manifests(config)
    workers.pop(killed).kill()
    for worker in workers.values():
        worker.resume()


# tests/sf_core/training has gangs without a stack
@pytest.mark.nightly
def test_two_lent_trainers_train_together(colocated: Cluster) -> None:
    config = gang_config(colocated, "gang")
    colocated.finish(config, colocated.start(config))
    check_result(config)
    assert ranks(config) == [2] * 3


@pytest.mark.nightly
def test_colocated_devices_sample_and_train_in_turn_and_measure_what_a_killed_flow_left(
    colocated: Cluster,
) -> None:
    config = colocated.config("colocated", "colocated", train={"iterations": 2, "workers": 2})
    process = colocated.start(config)
    await_ranks(process, config, 1)
    # the rest of the iteration goes on without it, but for the evaluation
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: is_committed(config, 1, "publish"), "the last iteration")
    process.kill()
    process.wait()
    assert (2, "evaluate") not in manifests(config)
    colocated.finish(config, colocated.start(config))
    check_result(config)
    assert manifests(config)[2, "evaluate"]["attempt"] == 2
    assert config.lag_bound == 0
    assert ranks(config) == [2] * 2
    assert holders(config, "rollout") == holders(config, "train") == {"t0", "t1"}
    assert overlap_s(spans(config, "rollout"), spans(config, "train")) <= 0


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("killed", "min_workers"),
    [("t0", 2), ("t1", 2), ("t0", 1), ("t1", 1)],
)
def test_with_a_killed_rank_the_step_is_tried_again_by_as_many_as_the_plan_needs(
    colocated: Cluster, killed: str, min_workers: int
) -> None:
    config = gang_config(colocated, f"{killed}-killed-{min_workers}-needed", min_workers=min_workers)
    process = colocated.start(config)
    kill_rank(colocated, config, process, killed)
    before = manifests(config)
    colocated.finish(config, process)
    after = manifests(config)
    assert {key: after[key] for key in before} == before
    check_result(config)
    assert ranks(config)[:2] == [2, min_workers]
    assert "training of iteration 1: attempt 0 failed" in colocated.log(config)


def test_a_lease_that_does_not_yield_is_ended_by_force(colocated: Cluster) -> None:
    config = colocated.config(
        "hanging",
        train={"iterations": 2, "workers": 2},
        cluster={"scheduler": colocated.services.scheduler, "yield_timeout_s": 3},
    )
    process = colocated.start(config)
    hanging = wait_until(lambda: is_committed(config, 0, "publish") and colocated.worker_process("t1"), "0")
    wait_until(lambda: is_committed(config, 1, "rollout"), "batch of iteration 1")
    hanging.suspend()
    assert not (seats(config, 1) / "rank-1").exists()
    colocated.finish(config, process)
    assert not hanging.is_running()
    assert "t1 did not free its device within 3 s: the worker process is killed" in colocated.log(config)
    check_result(config)
    assert ranks(config) == [2] * 2
