"""A second run on a cluster, with workers in this process."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator

import dask
import pytest
from distributed import Client, Scheduler, SpecCluster, Worker
from typer.testing import CliRunner

from sf_core.cli.main import app
from sf_core.config import RunConfig
from sf_core.scheduling import cluster
from tests.bench import ROOT
from tests.bench.waits import patience, wait_until

TAGS = {"t0": "rollout train cpu", "a0": "agent", "a1": "agent"}
over = threading.Event()


def hold() -> None:
    """A task that goes on when Dask no longer wants it."""
    over.wait(patience())


@pytest.fixture
def tagged_client() -> Iterator[Client]:
    workers = {
        name: {
            "cls": Worker,
            "options": {
                "nthreads": 1,
                "resources": dict.fromkeys([*tags.split(), f"@{name}"], 1),
                "dashboard": False,
            },
        }
        for name, tags in TAGS.items()
    }
    scheduler = {"cls": Scheduler, "options": {"dashboard": False, "host": "127.0.0.1"}}
    with SpecCluster(workers, scheduler) as cluster, Client(cluster, set_as_default=False) as client:
        yield client
        over.set()


def work(client: Client, owner: str, *workers: str) -> None:
    """Run a task of this owner on each worker until `over` is set."""
    over.clear()
    for worker in workers:
        with dask.annotate(resources={f"@{worker}": 1}, owner=owner):
            client.submit(hold, key=f"{owner}-{worker}")
    active = lambda dask_worker: len(dask_worker.active_threads)  # noqa: E731
    wait_until(lambda: sum(client.run(active).values()) == len(workers), "the tasks", every_s=0.05)


def test_a_second_run_waits_until_the_first_has_given_its_workers_back(tagged_client: Client) -> None:
    scheduler = tagged_client.scheduler.address
    told = []
    work(tagged_client, "first.1.1", "a0", "t0")

    def hear(sentence: str) -> None:
        told.append(sentence)
        over.set()

    found = cluster.await_plan(scheduler, RunConfig(run_id="second"), hear)
    assert (found.trainers, found.agent) == (("t0",), ("a0", "a1"))
    [sentence] = told
    assert sentence.startswith(
        "workers a0, t0 are held by run first.1, and a cluster serves one run at a time: wait until that "
        "run ends, or cancel that run; "
    )
    # how long is left depends on how busy the machine is
    assert re.search(r"; that run may be ending: waiting for 1?\d\d s$", sentence)


def test_a_second_run_is_refused_by_a_first_that_does_not_end_and_the_first_goes_on(
    tagged_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = tagged_client.scheduler.address
    work(tagged_client, "first.1", "a1")
    monkeypatch.setattr(cluster, "GIVEN_BACK_S", 0.0)
    with pytest.raises(ValueError, match="worker a1 is held by run first, and a cluster serves one run"):
        cluster.await_plan(scheduler, RunConfig(run_id="second"))
    # what another attempt has left is its own
    assert cluster.await_plan(scheduler, RunConfig(run_id="first")).trainers == ("t0",)

    said = CliRunner().invoke(
        app, ["plan", str(ROOT / "configs" / "quickstart.yaml"), "--scheduler", scheduler]
    )
    assert "worker a1 is held by run first; a run that starts now" in " ".join(said.output.split())

    # beside it, on workers that are its own, the second run begins
    monkeypatch.setenv("SF_WORKERS", "t0, a0")
    beside = cluster.await_plan(scheduler, RunConfig(run_id="second"))
    assert (beside.trainers, beside.agent) == (("t0",), ("a0",))
    assert sorted(worker.name for worker in cluster.list_connected(tagged_client).values()) == ["a0", "t0"]
