import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import dask
import typer

from sf_core.cli.main import app
from sf_core.reports.tables import DEVICE_COLUMNS
from storage.run_directory import RunDirectory
from storage.tables.metrics import write_metrics
from tests import bench
from tests.bench import runs


def test_a_place_that_cannot_be_written_is_refused_before_anything_starts() -> None:
    code, output = bench.commands.sf("train", "quickstart", "--set", "storage.root=/dev/null/runs")
    assert (code, "error: /dev/null/runs: the storage failed" in output) == (2, True), output


def test_a_program_need_not_be_here_if_workers_are_elsewhere() -> None:
    plan = ("plan", "configs/emulated.yaml", "--set", "environment.agent={command: [nobody]}")
    _, output = bench.commands.sf(*plan)
    assert "the program 'nobody' does not exist on this host" in output
    _, output = bench.commands.sf(*plan, "--set", "cluster.scheduler=tcp://127.0.0.1:9")
    assert "cluster.scheduler names tcp://127.0.0.1:9, but nothing answers there" in output


def test_a_recipe_is_planned_by_its_name() -> None:
    (code, by_name) = bench.commands.sf("plan", "gspo")
    (_, by_path) = bench.commands.sf("plan", "configs/recipes/gspo.yaml")
    assert bench.commands.without_time(by_name) == bench.commands.without_time(by_path)
    assert code == 0


def test_the_version_is_printed() -> None:
    assert bench.commands.sf("--version") == (0, f"seamlessflow {version('seamlessflow')}")


def test_every_command_that_listens_does_so_on_loopback() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    hosts = {
        name: option.default
        for name, command in commands.items()
        for option in command.params
        if option.name == "host"
    }
    assert {"dataplane", "scheduler", "serve", "server", "worker"} <= hosts.keys()
    assert set(hosts.values()) == {"127.0.0.1"}


def test_a_worker_with_certificates_is_not_open_to_a_scheduler_without() -> None:
    with dask.config.set({"distributed.comm.tls": {"ca-file": "ca.pem", "worker": {"cert": "host.pem"}}}):
        code, output = bench.commands.sf(
            "worker", "--host", "0.0.0.0", "--tags", "cpu", "--scheduler", "tcp://192.0.2.1:8786"
        )
    assert (code, "use a tls:// scheduler, got tcp://192.0.2.1:8786" in output) == (2, True), output


def test_a_table_in_a_pipe_is_not_cut(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path / "run-1"))
    runs.configure(run)
    figures = {name: 1234.0 for name in DEVICE_COLUMNS} | {f"idle_node-{i}.cluster": 1.0 for i in range(8)}
    for number in range(11):
        runs.commit(run, number, "filter", data={"lags": [1]})
        write_metrics(run, "devices", number, [figures])
    environment = {name: value for name, value in os.environ.items() if name != "DEVICE_COLUMNS"}
    command = [sys.executable, "-m", "sf_core", "inspect", run.uri]
    output = subprocess.run(
        command, env=environment, capture_output=True, check=True, encoding="utf-8"
    ).stdout
    assert "\N{HORIZONTAL ELLIPSIS}" not in output
    [row] = [line for line in output.splitlines() if line.startswith("10") and "100%" in line]
    assert row.split()[1:9] == ["100%"] * 8
