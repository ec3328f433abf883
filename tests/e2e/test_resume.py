"""Design 5.6 and invariant 9: real kills at each of the four stages lose and repeat nothing committed."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from sf_core.cli.replay import replay
from sf_core.cli.stack.local import start_dataplane
from tests.bench import stacks, waits
from tests.bench.stacks import invariants


# the next test kills a flow once, where it costs most: while it trains
@pytest.mark.nightly
def test_a_flow_that_is_killed_in_any_stage_goes_on_in_this_stage(cluster: stacks.cluster.Cluster) -> None:
    config = cluster.config("flow-killed")
    before: dict[tuple[int, str], Any] = {}
    # each flow has a stage to end before that in which it is killed
    for iteration, stage in ((1, "rollout"), (1, "train"), (2, "filter"), (2, "publish")):
        process = cluster.start(config)
        stacks.cluster.await_stage(cluster, config, process, iteration, stage)
        process.kill()
        process.wait()
        now = invariants.manifests(config)
        assert {key: now[key] for key in before} == before
        before = now
    cluster.finish(config, cluster.start(config))
    after = invariants.manifests(config)
    assert {key: after[key] for key in before} == before
    invariants.check_result(config)


def test_an_older_flow_is_refused_a_killed_one_is_continued_and_a_finished_run_is_not_run_again(
    cluster: stacks.cluster.Cluster,
) -> None:
    """A newer flow supersedes an older one and is killed. A third flow finishes the run."""
    config = cluster.config("flows", train={"iterations": 6})
    older = cluster.start(config)
    waits.wait_until(
        lambda: stacks.cluster.is_committed(config, 0, "publish") or older.poll() is not None, "an iteration"
    )
    older.send_signal(signal.SIGSTOP)
    before = invariants.manifests(config)
    newer = cluster.start(config)
    waits.wait_until(lambda: Path(config.run_dir, "attempts", "00002").exists(), "another attempt")
    # or it would have trained everything before the older one has ended
    newer.send_signal(signal.SIGSTOP)
    older.send_signal(signal.SIGCONT)
    assert older.wait(waits.patience()) != 0
    assert re.search("[Aa]ttempt 1 .*was superseded by a later attempt", cluster.log(config))
    newer.send_signal(signal.SIGCONT)

    stacks.cluster.await_stage(cluster, config, newer, 2, "train")
    newer.kill()
    newer.wait()
    now = invariants.manifests(config)
    assert {key: now[key] for key in before} == before
    assert {manifest["attempt"] for manifest in now.values()} == {1, 2}
    cluster.finish(config, cluster.start(config))
    after = invariants.manifests(config)
    assert {key: after[key] for key in now} == now
    invariants.check_result(config)

    cluster.finish(config, cluster.start(config))
    assert invariants.manifests(config) == after


def test_what_is_killed_is_replaced_and_the_run_ends_as_if_nothing_happened(
    cluster: stacks.cluster.Cluster,
) -> None:
    """Every worker, and the data plane while it is sampled for and while it is trained; with a critic and a
    reference that is renewed, so that a trainer has all to make again that it can have."""
    kills = [
        (1, "rollout", "r0"),
        (1, "rollout", "a0"),
        (1, "filter", "c0"),
        (1, "train", "t0"),
        (2, "rollout", "dataplane"),
        (2, "filter", "c0"),
        (2, "train", "dataplane"),
        (2, "publish", "c0"),
    ]
    formulas = {"advantage": "gae", "critic": {}, "loss": {"kl": {"coefficient": 0.1, "renew_every": 2}}}
    config = cluster.config("killed", train={"iterations": 3, "checkpoint_every": 3, **formulas})
    process = cluster.start(config)
    before: dict[tuple[int, str], Any] = {}
    for iteration, stage, killed in kills:
        stacks.cluster.await_stage(cluster, config, process, iteration, stage)
        before |= invariants.manifests(config)
        if killed == "dataplane":
            cluster.restart_dataplane()
        else:
            cluster.worker_process(killed).kill()
    cluster.finish(config, process)
    after = invariants.manifests(config)
    assert {key: after[key] for key in before} == before
    invariants.check_result(config)
    threads = torch.get_num_threads()
    try:
        assert all(replay(config.run_dir, iteration).equal for iteration in range(3))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.nightly
def test_a_run_goes_on_after_its_leases_were_lost_with_a_data_plane_that_was_long_away(
    cluster: stacks.cluster.Cluster,
) -> None:
    config = cluster.config("dataplane-away", "async", train={"iterations": 3})
    process = cluster.start(config)
    stacks.cluster.await_stage(cluster, config, process, 1, "train")
    seat = Path(config.run_dir, "gangs", "00001", "1.0", "rank-0")
    waits.wait_until(lambda: seat.exists() or process.poll() is not None, "the rank of iteration 1")
    trainer = cluster.worker_process("t0")
    trainer.suspend()
    try:
        assert (1, "train") not in invariants.manifests(config)
        cluster.stack.remove(cluster.stack.processes["dataplane"])
        try:
            for lease in ("r0-[0-9]", "a0-[0-9]"):
                lost = re.compile(
                    rf"lease {lease}+\.1 was lost \(ConnectionError: .*data plane at .*a new lease"
                )
                waits.wait_until(lambda lost=lost: lost.search(cluster.log(config)), lost.pattern)
        finally:
            start_dataplane(cluster.stack, cluster.folder, urlsplit(cluster.services.dataplane).port)()
    finally:
        trainer.resume()
    cluster.finish(config, process)
    invariants.check_result(config)
