"""A cluster of three hosts with TLS, a key and a password, of which one is cut off in the middle of a run."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import httpx
import pytest

from sf_core.cli.stack.local import Services, local_stack
from sf_core.cli.stack.processes import Part
from sf_core.cli.stack.supervisor import Supervisor
from sf_core.dataplane.control.client import DataplaneClient
from sf_core.dataplane.operator_key import operator_key
from sf_core.scheduling.cluster import read_workers
from tests import bench
from tests.bench import waits
from tests.e2e import hosts

SECRETS = {
    "SF_DATAPLANE_KEY": "planted-key",
    "PREFECT_SERVER_API_AUTH_STRING": "sf:planted-password",
    "PREFECT_API_AUTH_STRING": "sf:planted-password",
}


def certificates(folder: Path) -> dict[str, str]:
    """Dask's settings for TLS, with files that the documented script makes."""
    subprocess.run(
        [str(bench.ROOT / "deploy" / "certificates"), str(folder), "host"],
        check=True,
        timeout=waits.patience(),
    )
    files = {"ca-file": "ca.pem"}
    for role in ("scheduler", "worker", "client"):
        files |= {f"{role}.cert": "host.pem", f"{role}.key": "host.key"}
    return {f"distributed.comm.tls.{setting}": str(folder / name) for setting, name in files.items()}


@pytest.fixture
def tls(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Environment with TLS settings for all parts; this process has the settings too."""
    settings = certificates(tmp_path / "tls")
    names = {key: f"DASK_{key}".upper().replace(".", "__").replace("-", "_") for key in settings}
    with dask.config.set(settings):
        yield {"PYTHONPATH": str(bench.ROOT)} | {names[key]: value for key, value in settings.items()}


@pytest.fixture
def three() -> Iterator[list[hosts.Host]]:
    with hosts.hosts(3) as found:
        yield found


@pytest.fixture
def cluster(
    three: list[hosts.Host], tls: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[bench.stacks.cluster.Cluster]:
    main, rollout, dual = three
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    services = Services(
        api=f"http://{main.address}:4200/api",
        scheduler=f"tls://{main.address}:8786",
        dataplane=f"http://{main.address}:8700",
    )
    env = tls | {
        "PREFECT_HOME": bench.stacks.prefect_home.make_prefect_home(tmp_path / "prefect"),
        "PREFECT_API_URL": services.api,
        "SF_CACHE_DIR": str(tmp_path / "cache"),
        "GATES": str(tmp_path / "gates"),
    }
    (tmp_path / "gates").mkdir()
    with local_stack(tmp_path / "logs", env) as stack:
        start(stack, main, "server", "server")
        start(stack, main, "scheduler", "scheduler")
        start(stack, main, "dataplane", "dataplane", "--journal-dir", str(tmp_path / "journal"))
        start_worker(stack, main, "a0", "agent", services.scheduler)
        start_worker(stack, main, "c0", "cpu", services.scheduler)
        for host, name, tags in ((rollout, "r0", "rollout"), (dual, "t0", "rollout,train")):
            start_worker(stack, host, name, tags, services.scheduler, HOLD=str(tmp_path / f"{name}-hold"))
        main.call(lambda: await_all(services, {"a0", "c0", "r0", "t0"}))
        assert [len(listening(host)) for host in three] == [3 + 2 * 2, 2, 2], "servers, workers and nannies"
        yield bench.stacks.cluster.Cluster(stack, tmp_path, services, prefix=main.exec)


def start(stack: Supervisor, host: hosts.Host, name: str, *command: str, **env: str) -> None:
    whole = [*host.exec, sys.executable, "-m", "sf_core", *command, "--host", host.address]
    stack.start(Part(name, whole, env))


def start_worker(
    stack: Supervisor, host: hosts.Host, name: str, tags: str, scheduler: str, **env: str
) -> None:
    options = ("--scheduler", scheduler, "--name", name, "--tags", tags, "--threads", "1")
    start(stack, host, name, "worker", *options, **env)


def await_all(services: Services, names: set[str]) -> None:
    waits.wait_until(lambda: answers(f"{services.api}/health"), "the Prefect server", every_s=0.5)
    waits.wait_until(lambda: answers(f"{services.dataplane}/metrics"), "the data plane", every_s=0.5)
    waits.wait_until(lambda: names <= joined(services.scheduler), "the workers", every_s=0.5)


def answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code < 500
    except httpx.HTTPError:
        return False


def joined(scheduler: str) -> set[str]:
    try:
        return {worker.name for worker in read_workers(scheduler)}
    except ValueError:
        return set()


def listening(host: hosts.Host) -> list[str]:
    """Addresses on which others can reach the host."""
    command = [*host.exec, "ss", "--listening", "--tcp", "--numeric", "--no-header"]
    said = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=waits.patience(), encoding="utf-8"
    ).stdout
    addresses = [line.split()[3] for line in said.splitlines()]
    return [address for address in addresses if not address.startswith("127.0.0.1:")]


def test_a_worker_of_another_host_needs_a_certificate_and_joins_again_after_it_was_cut_off(
    tls: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sf_core.scheduling.cluster.ANSWER_S", 5.0)
    # the shortest that Dask takes
    env = tls | {"SF_EMULATED": "1", "DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP": "11s"}
    with hosts.hosts(2) as (main, other), local_stack(tmp_path / "logs", env) as stack:
        scheduler = f"tls://{main.address}:8786"
        names = lambda: main.call(lambda: joined(scheduler))  # noqa: E731
        start(stack, main, "scheduler", "scheduler")
        start_worker(stack, other, "r0", "rollout", scheduler)
        waits.wait_until(lambda: names() == {"r0"}, "the worker", every_s=0.5)
        other.cut()
        waits.wait_until(lambda: names() == set(), "its loss", every_s=0.5)
        other.mend()
        waits.wait_until(lambda: names() == {"r0"}, "its return", every_s=0.5)

        strange = certificates(tmp_path / "strange")
        with dask.config.set(strange | {"distributed.comm.tls.ca-file": str(tmp_path / "tls" / "ca.pem")}):
            assert names() == set(), "a client of another authority was let in"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("number", "worker", "without"),
    [pytest.param(1, "r0", "publish", id="rollout"), pytest.param(2, "t0", "filter", id="dual")],
)
def test_a_host_that_is_cut_off_costs_nothing_and_is_used_again_when_it_is_back(
    three: list[hosts.Host], cluster: bench.stacks.cluster.Cluster, number: int, worker: str, without: str
) -> None:
    main = three[0]
    lost = three[number]
    package = {part: f"tests.e2e.held_package:{part}" for part in ("tasks", "agent", "reward")}
    config = cluster.config(
        "cut-off",
        "multiplexed",
        environment=package,
        engine={"script": "tests.e2e.held_package:script"},
        train={"iterations": 4},
        evaluate={"every": 4},
    )
    gates = cluster.folder / "gates"
    hold = cluster.folder / f"{worker}-hold"
    (gates / "0").touch()
    process = cluster.start(config)
    waits.wait_until(
        lambda: bench.stacks.cluster.is_committed(config, 0, "publish") or process.poll() is not None,
        "iteration 0",
    )

    hold.touch()
    (gates / "1").touch()
    waits.wait_until(Path(f"{hold}ing").exists, "work at the host")
    lost.cut()
    hold.unlink()
    # as far as the others get
    waits.wait_until(
        lambda: bench.stacks.cluster.is_committed(config, 1, without) or process.poll() is not None,
        "iteration 1",
    )

    mended = time.time()
    lost.mend()
    url = cluster.services.dataplane
    status = DataplaneClient(url, "cut-off", operator_key(url)).status
    waits.wait_until(lambda: worker in serving(main.call(status)), "its engine", every_s=0.5)
    for gate in ("2", "3"):
        (gates / gate).touch()
    cluster.finish(config, process)
    bench.stacks.invariants.check_result(config)
    assert "did not free its device" not in cluster.log(config)
    sampled = [
        span
        for span in bench.stacks.cluster.spans(config, "rollout")
        if span.worker == worker and span.tokens
    ]
    assert min(span.start for span in sampled) < mended < max(span.start for span in sampled)


def serving(status: dict[str, Any]) -> set[str]:
    """Workers whose engines are serving."""
    return {engine["worker"] for engine in status["engines"] if engine["state"] == "serving"}
