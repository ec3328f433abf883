"""Workers that join a run and workers that leave it for good."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pyarrow.parquet as pq
import pytest
from distributed import Client, Event

from sf_core.scheduling.cluster import describe_holders
from storage.run_directory import RunDirectory
from tests.bench import stacks, waits
from tests.bench.dataplane.planes import operator_client


# workers that join and leave are below, too
@pytest.mark.nightly
def test_a_rollout_worker_joins_is_caught_up_and_carries_on_when_the_first_is_lost(
    cluster: stacks.cluster.Cluster,
) -> None:
    config = cluster.config("joining", "async", train={"iterations": 4})
    plane = operator_client(cluster.services.dataplane)
    url = "/runs/joining"
    with stacks.joining.restored(cluster):
        process = cluster.start(config)
        waits.wait_until(
            lambda: stacks.cluster.is_committed(config, 1, "publish") or process.poll() is not None, "2"
        )
        # nothing ends while nothing is sampled: there is time to join
        plane.post(f"{url}/pause", json={"mode": "freeze"}).raise_for_status()
        stacks.joining.start_worker(cluster, "r1", "rollout")

        def versions() -> dict[str, int | None]:
            return {engine["worker"]: engine["version"] for engine in plane.get(url).json()["engines"]}

        waits.wait_until(
            lambda: versions().get("r1") is not None or process.poll() is not None,
            "r1",
            every_s=0.1,
        )
        newest = plane.get(url).json()["version"]
        assert versions() == {"r0": newest, "r1": newest}, cluster.log(config)[-2000:]
        held = describe_holders(cluster.services.scheduler, "another")
        assert re.fullmatch(r"workers a0, (c0, )?r0, r1(, t0)? are held by run joining", held)
        stacks.joining.end_worker(cluster, "r0")
        plane.post(f"{url}/resume", json={}).raise_for_status()
        cluster.finish(config, process)
    stacks.invariants.check_result(config)
    sampled = [span for span in stacks.cluster.spans(config, "rollout") if span.worker == "r1"]
    assert sum(span.tokens for span in sampled) > 0
    assert min(span.version or 0 for span in sampled) >= 2


@pytest.mark.nightly
def test_an_agent_worker_joins_and_rewards_are_scored_on_the_reward_worker(
    cluster: stacks.cluster.Cluster,
) -> None:
    environment = {
        "tasks": "tests.bench.stacks.echo_package:tasks",
        "agent": "tests.bench.stacks.echo_package:after_event",
        "reward": "tests.bench.stacks.echo_package:reward_with_worker",
    }
    config = cluster.config(
        "runners-join",
        "disaggregated",
        environment=environment,
        train={"iterations": 2, "advantage": "two_level"},
        evaluate={"num_tasks": 1},
    )
    plane = operator_client(cluster.services.dataplane)
    url = "/runs/runners-join"

    def holders() -> set[str]:
        """Workers of the runners."""
        answer = plane.get(url)
        runners = answer.json()["runners"] if answer.is_success else {}
        return {name.partition(":")[0] for name in runners}

    def await_holders(wanted: set[str]) -> None:
        waits.wait_until(lambda: holders() == wanted or process.poll() is not None, f"{wanted}", every_s=0.1)
        assert process.poll() is None, cluster.log(config)[-2000:]

    with stacks.joining.restored(cluster), Client(cluster.services.scheduler, set_as_default=False) as client:
        stacks.joining.start_worker(cluster, "s0", "reward")
        waits.wait_until(lambda: "s0" in stacks.joining.connected(cluster), "s0", every_s=0.2)
        process = cluster.start(config)
        await_holders({"a0", "s0"})
        # agents wait for these events: there is time to join
        stacks.joining.start_worker(cluster, "a1", "agent")
        await_holders({"a0", "a1", "s0"})
        for split in ("holdout", "train"):
            Event(f"echo-{split}", client=client).set()
        cluster.finish(config, process)
    stacks.invariants.check_result(config)
    directory = RunDirectory(config.run_dir)
    manifest = directory.read_manifest(1, "rollout")
    assert manifest is not None
    rows = pq.ParquetFile(directory.path(manifest.outputs[0].uri)).read(["reward_parts", "turns", "messages"])
    assert {part["name"] for parts in rows["reward_parts"].to_pylist() for part in parts} == {
        "correct",
        "by_s0",
    }
    for messages, turns in zip(rows["messages"].to_pylist(), rows["turns"].to_pylist(), strict=True):
        [earned] = [turn["reward"] for turn in turns if turn["engine"]]
        assert earned == len(json.loads(messages)[-1]["content"])


def test_a_trainer_that_is_lost_for_good_is_replaced_by_one_that_joins(
    cluster: stacks.cluster.Cluster,
) -> None:
    config = cluster.config("trainer-lost", "multiplexed", train={"iterations": 4, "gang_timeout_s": 5})
    with stacks.joining.restored(cluster):
        process = cluster.start(config)
        waits.wait_until(
            lambda: stacks.cluster.is_committed(config, 0, "publish") or process.poll() is not None, "0"
        )
        stacks.joining.end_worker(cluster, "t0")
        before = stacks.invariants.manifests(config)
        lost = "failed (t0 left and did not come back within 5 s)"
        waits.wait_until(lambda: lost in cluster.log(config) or process.poll() is not None, lost, every_s=0.1)
        stacks.joining.start_worker(cluster, "t1", "rollout", "train")
        cluster.finish(config, process)
    stacks.invariants.check_result(config)
    after = stacks.invariants.manifests(config)
    assert {key: after[key] for key in before} == before
    assert stacks.cluster.holders(config, "train") == {"t0", "t1"}
    # from the next iteration on it is lent as the first one was
    assert "t1" in stacks.cluster.holders(config, "rollout")
    assert "retry on t1" in cluster.log(config)


@pytest.mark.nightly
def test_a_trainer_whose_loan_was_lost_while_it_was_away_rolls_out_again_when_it_is_back(
    cluster: stacks.cluster.Cluster,
) -> None:
    config = cluster.config(
        "loan-lost",
        train={"iterations": 2},
        rollout={"overlap": False},
        engine={"kind": "emulated"},
        # an engine loads a version for two seconds, in which the run is paused; a trainer writes it at once
        emulation={"time_dilation": 4.0, "write_bandwidth": 4e10},
    )
    plane = operator_client(cluster.services.dataplane)
    url = "/runs/loan-lost"
    with stacks.joining.restored(cluster), Client(cluster.services.scheduler, set_as_default=False) as client:
        patience_s = client.run_on_scheduler(give_up_after, 3.0)
        try:
            process = cluster.start(config)
            waits.wait_until(
                lambda: stacks.cluster.is_committed(config, 0, "publish") or process.poll() is not None, "0"
            )
            plane.post(f"{url}/pause", json={"mode": "freeze"}).raise_for_status()
            waits.wait_until(lambda: plane.get(url).json().get("iteration") == 1, "iteration 1", every_s=0.1)
            assert not stacks.cluster.is_committed(config, 1, "rollout")
            stacks.joining.end_worker(cluster, "t0")
            waits.wait_until(
                lambda: client.run_on_scheduler(num_unrunnable) > 0, "its loans to wait", every_s=0.2
            )
            waits.wait_until(lambda: client.run_on_scheduler(num_unrunnable) == 0, "their loss", every_s=0.2)
        finally:
            client.run_on_scheduler(give_up_after, patience_s)
        back = time.time()
        stacks.joining.start_worker(cluster, "t0", "rollout", "train")

        def serving() -> set[str]:
            engines = plane.get(url).json()["engines"]
            return {engine["worker"] for engine in engines if engine["version"] is not None}

        waits.wait_until(lambda: serving() == {"r0", "t0"} or process.poll() is not None, "t0", every_s=0.2)
        plane.post(f"{url}/resume", json={}).raise_for_status()
        cluster.finish(config, process)
    stacks.invariants.check_result(config)
    assert "t0 gets a new lease" in cluster.log(config)
    assert "did not free its device" not in cluster.log(config)
    [trained] = [span for span in stacks.cluster.spans(config, "train", "held") if span.lease == "train-1.1"]
    loans = [span for span in stacks.cluster.spans(config, "rollout", "held") if span.worker == "t0"]
    assert any(back < loan.start < loan.end <= trained.start for loan in loans)


def give_up_after(seconds: float, dask_scheduler: Any) -> float:
    """Executed on the scheduler: sets its no_workers_timeout and returns the old value."""
    before = dask_scheduler.no_workers_timeout
    dask_scheduler.no_workers_timeout = seconds
    return float(before)


def num_unrunnable(dask_scheduler: Any) -> int:
    return len(dask_scheduler.unrunnable)


@pytest.mark.nightly
def test_a_run_without_a_trainer_fails_when_none_has_joined_by_its_deadline(
    cluster: stacks.cluster.Cluster,
) -> None:
    # every stage has this deadline, also those that end beside other tests
    deadline = {"stage_timeout_s": waits.patience(60)}
    config = cluster.config("no-trainer", train={"iterations": 9, "gang_timeout_s": 5}, cluster=deadline)
    with stacks.joining.restored(cluster):
        process = cluster.start(config)
        waits.wait_until(
            lambda: stacks.cluster.is_committed(config, 0, "publish") or process.poll() is not None, "0"
        )
        stacks.joining.end_worker(cluster, "t0")
        waits.wait_until(lambda: process.poll() is not None, "the deadline", every_s=0.2)
    assert process.returncode != 0
    lacks = r"for workers to train iteration \d: no worker is tagged train; workers: "
    assert re.search(lacks, cluster.log(config)), cluster.log(config)[-2000:]


@pytest.mark.nightly
def test_the_end_of_a_run_does_not_wait_for_a_lease_that_never_began(cluster: stacks.cluster.Cluster) -> None:
    config = cluster.config("never-began", "multiplexed", train={"iterations": 1}, evaluate={"num_tasks": 1})
    with Client(cluster.services.scheduler, set_as_default=False) as client:
        over = Event("never-began", client=client)
        busy = client.submit(lambda: Event("never-began").wait(600), resources={"@r0": 1}, priority=1)
        try:
            waits.wait_until(lambda: busy.key in cluster.running_tasks(), "a task on r0", every_s=0.2)
            cluster.finish(config, cluster.start(config))
        finally:
            over.set()
            busy.result()
    stacks.invariants.check_result(config)
    assert stacks.cluster.holders(config, "rollout") == {"t0"}
    assert "did not end" not in cluster.log(config)
