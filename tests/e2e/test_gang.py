"""Two lent trainers train together: with each of them killed, and with one that hangs."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sf_core.config import RunConfig
from tests.bench import stacks, waits
from tests.bench.stacks import invariants


@pytest.fixture(scope="module")
def colocated(cluster: stacks.cluster.Cluster) -> Iterator[stacks.cluster.Cluster]:
    """Cluster with two trainers, t0 and t1, and no worker that only samples."""
    with stacks.joining.restored(cluster):
        stacks.joining.end_worker(cluster, "r0")
        stacks.joining.start_worker(cluster, "t1", "rollout", "train")
        waits.wait_until(
            lambda: stacks.joining.connected(cluster) == {"t0", "t1", "a0", "c0"}, "the workers", every_s=0.2
        )
        yield cluster


def ranks(config: RunConfig) -> list[int]:
    """Number of ranks that trained each iteration."""
    committed = invariants.manifests(config)
    return [committed[k, "train"]["data"]["ranks"] for k in range(config.train.iterations)]


def seats(config: RunConfig, iteration: int, epoch: int = 0) -> Path:
    return Path(config.run_dir) / "gangs" / f"{iteration:05d}" / f"1.{epoch}"


def await_ranks(process: subprocess.Popen[bytes], config: RunConfig, iteration: int) -> None:
    """Wait until both ranks have begun this train stage."""
    folder = seats(config, iteration)
    waits.wait_until(
        lambda: all((folder / f"rank-{rank}").exists() for rank in (0, 1)) or process.poll() is not None,
        f"ranks of iteration {iteration}",
    )


def kill_rank(
    cluster: stacks.cluster.Cluster,
    config: RunConfig,
    process: subprocess.Popen[bytes],
    iteration: int,
    killed: str,
) -> None:
    """kill -9 of a worker when both ranks of this iteration have begun and none is through."""
    before = f"iteration {iteration - 1}"
    waits.wait_until(
        lambda: stacks.cluster.is_committed(config, iteration - 1, "publish") or process.poll() is not None,
        before,
    )
    workers = {name: cluster.worker_process(name) for name in ("t0", "t1")}
    await_ranks(process, config, iteration)
    for worker in workers.values():
        worker.suspend()
    assert (iteration, "train") not in invariants.manifests(config)
    workers.pop(killed).kill()
    for worker in workers.values():
        worker.resume()


@pytest.mark.nightly
def test_colocated_devices_sample_and_train_in_turn_and_measure_what_a_killed_flow_left(
    colocated: stacks.cluster.Cluster,
) -> None:
    config = colocated.config("colocated", "colocated", train={"iterations": 2, "workers": 2})
    process = colocated.start(config)
    await_ranks(process, config, 1)
    # the rest of the iteration goes on without it, but for the evaluation
    process.send_signal(signal.SIGSTOP)
    waits.wait_until(lambda: stacks.cluster.is_committed(config, 1, "publish"), "the last iteration")
    process.kill()
    process.wait()
    assert (2, "evaluate") not in invariants.manifests(config)
    colocated.finish(config, colocated.start(config))
    invariants.check_result(config)
    assert invariants.manifests(config)[2, "evaluate"]["attempt"] == 2
    assert config.lag_bound == 0
    assert ranks(config) == [2] * 2
    assert (
        stacks.cluster.holders(config, "rollout") == stacks.cluster.holders(config, "train") == {"t0", "t1"}
    )
    assert (
        stacks.cluster.overlap_s(
            stacks.cluster.spans(config, "rollout"), stacks.cluster.spans(config, "train")
        )
        <= 0
    )


# tests/sf_core/training has gangs without a stack
@pytest.mark.nightly
@pytest.mark.parametrize("min_workers", [2, 1])
def test_two_trainers_train_together_and_with_a_killed_rank_as_many_as_the_plan_needs_try_again(
    colocated: stacks.cluster.Cluster, min_workers: int
) -> None:
    """The first rank is killed in iteration 1, and the other one in iteration 3."""
    rules = {"iterations": 4, "workers": 2, "min_workers": min_workers, "gang_timeout_s": waits.patience(15)}
    config = colocated.config(f"killed-{min_workers}-needed", train=rules)
    process = colocated.start(config)
    before: dict[tuple[int, str], Any] = {}
    for iteration, killed in ((1, "t0"), (3, "t1")):
        kill_rank(colocated, config, process, iteration, killed)
        before |= invariants.manifests(config)
    colocated.finish(config, process)
    after = invariants.manifests(config)
    assert {key: after[key] for key in before} == before
    invariants.check_result(config)
    # a worker that is back trains again
    assert ranks(config) == [2, min_workers, 2, min_workers]
    for iteration in (1, 3):
        assert f"training of iteration {iteration}: attempt 0 failed" in colocated.log(config)


def test_a_lease_that_does_not_yield_is_ended_by_force(colocated: stacks.cluster.Cluster) -> None:
    # beside other tests, one that is sound takes longer
    bound_s = round(waits.patience(3.0))
    config = colocated.config(
        "hanging",
        train={"iterations": 2, "workers": 2},
        cluster={"yield_timeout_s": bound_s},
    )
    process = colocated.start(config)
    hanging = waits.wait_until(
        lambda: stacks.cluster.is_committed(config, 0, "publish") and colocated.worker_process("t1"), "0"
    )
    waits.wait_until(lambda: stacks.cluster.is_committed(config, 1, "rollout"), "batch of iteration 1")
    hanging.suspend()
    assert not (seats(config, 1) / "rank-1").exists()
    colocated.finish(config, process)
    assert not hanging.is_running()
    killed = f"t1 did not free its device within {bound_s} s: the worker process is killed"
    assert killed in colocated.log(config)
    invariants.check_result(config)
    assert ranks(config) == [2] * 2
