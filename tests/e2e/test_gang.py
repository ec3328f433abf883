"""Two lent trainers train together (design 5.1, 5.2): whole, with one killed, with one that does not yield."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sf_core.config import RunConfig, WorkerConfig
from sf_core.local_stack import local_stack, start_services
from storage.run_directory import STAGES
from tests.e2e.conftest import ROOT, Cluster, manifests, wait_until
from tests.e2e.test_resume import check_result

pytestmark = pytest.mark.slow

WORKERS = {
    "t0": WorkerConfig(tags=("rollout", "train"), threads=1),
    "t1": WorkerConfig(tags=("rollout", "train"), threads=1),
    "a0": WorkerConfig(tags=("agent",), threads=1),
    "c0": WorkerConfig(tags=("cpu",), threads=1),
}


@pytest.fixture(scope="module")
def colocated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("gang")
    (folder / "user").mkdir()
    env = {
        "PREFECT_HOME": str(folder / "prefect"),
        "PYTHONPATH": f"{ROOT}:{folder / 'user'}",
        "SF_CACHE_DIR": str(folder / "cache"),
    }
    with local_stack(folder / "logs", env) as stack:
        yield Cluster(stack, folder, start_services(stack, folder, WORKERS))


def gang_config(cluster: Cluster, run_id: str, **train: Any) -> RunConfig:
    return cluster.config(run_id, train={"iterations": 4, "workers": 2, "gang_timeout_s": 60, **train})


def ranks(config: RunConfig) -> list[int]:
    """How many ranks trained each iteration."""
    committed = manifests(config)
    return [committed[k, "train"]["data"]["ranks"] for k in range(config.train.iterations)]


def seats(config: RunConfig, iteration: int, epoch: int = 0) -> Path:
    return Path(config.run_dir) / "gangs" / f"{iteration:05d}" / f"1.{epoch}"


def worker_process(cluster: Cluster, name: str) -> psutil.Process:
    nanny = next(p for p in cluster.stack.processes if p.name == f"worker-{name}")
    return next(
        child
        for child in psutil.Process(nanny.popen.pid).children(recursive=True)
        if "spawn_main" in " ".join(child.cmdline()) and "tracker" not in " ".join(child.cmdline())
    )


def test_two_lent_trainers_train_together(colocated: Cluster) -> None:
    config = gang_config(colocated, "gang")
    colocated.finish(config, colocated.start(config))
    check_result(config)
    assert ranks(config) == [2] * 4


@pytest.mark.parametrize("killed", ["t0", "t1"])
def test_with_a_killed_rank_the_step_is_tried_again_by_all(colocated: Cluster, killed: str) -> None:
    config = gang_config(colocated, f"{killed}-killed")
    process = colocated.start(config)
    rank = f"rank-{killed[1]}"
    wait_until(
        lambda: (seats(config, 1) / rank).exists() or process.poll() is not None, "rank of iteration 1"
    )
    before = manifests(config)
    colocated.kill_worker(killed)
    colocated.finish(config, process)
    after = manifests(config)
    assert {key: after[key] for key in before} == before
    assert {(1, stage) for stage in STAGES} <= after.keys()
    check_result(config)
    assert ranks(config) == [2] * 4


def test_with_a_killed_rank_the_others_go_on_where_fewer_are_enough(colocated: Cluster) -> None:
    config = gang_config(colocated, "one-is-enough", min_workers=1)
    process = colocated.start(config)
    wait_until(
        lambda: (seats(config, 1) / "rank-1").exists() or process.poll() is not None, "rank of iteration 1"
    )
    before = manifests(config)
    colocated.kill_worker("t1")
    colocated.finish(config, process)
    after = manifests(config)
    assert {key: after[key] for key in before} == before
    check_result(config)
    assert ranks(config)[0] == 2 and ranks(config)[1] == 1


def test_a_lease_that_does_not_yield_is_ended_by_force(colocated: Cluster) -> None:
    config = colocated.config(
        "hanging",
        train={"iterations": 3, "workers": 2},
        cluster={"scheduler": colocated.services.scheduler, "yield_timeout_s": 3},
    )
    process = colocated.start(config)
    wait_until(lambda: (0, "publish") in manifests(config) or process.poll() is not None, "iteration 0")
    hanging = worker_process(colocated, "t1")
    os.kill(hanging.pid, signal.SIGSTOP)
    colocated.finish(config, process)
    assert not hanging.is_running()
    assert "t1 did not yield within 3 s: its process is ended" in colocated.log(config)
    check_result(config)
    assert ranks(config) == [2] * 3
