import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import dask
import pytest
import typer

from sf_core.cli.main import app
from sf_core.config.yaml_file import builtin_configs
from sf_core.reports.tables import DEVICE_COLUMNS
from storage.run_directory import RunDirectory
from storage.tables.metrics import write_metrics
from tests.bench.commands import sf, without_time
from tests.bench.runs import commit, configure


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("rollout.group_size=0", "rollout.group_size: input should be greater than or equal to 1, got 0"),
        ("trian.iterations=3", "trian: unknown key; allowed here: run_id, seed, pipeline, policy"),
        ("environment.agent=nowhere:agent", "environment.agent: nowhere:agent: cannot import nowhere"),
        (
            "environment.agent={command: [nobody]}",
            "environment.agent: the program 'nobody' does not exist on",
        ),
        ("environment.reward=json:score", "environment.reward: json:score: module json has no score"),
        ("environment.group_reward=json:vote", "environment.group_reward: json:vote: module json has no"),
        ("policy.model=/nowhere", "policy.model: /nowhere does not exist"),
        ("storage.root=/dev/null/runs", "/dev/null/runs: the storage failed"),
    ],
)
def test_a_run_that_cannot_work_is_refused_before_anything_starts(
    tmp_path: Path, setting: str, sentence: str
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(f"storage:\n  root: {tmp_path / 'runs'}\n", encoding="utf-8")
    code, output = sf("train", str(config), "--set", setting)
    assert (code, sentence in output) == (2, True), output
    assert not (tmp_path / "runs").exists()


def test_a_program_need_not_be_here_if_workers_are_elsewhere() -> None:
    plan = ("plan", "configs/emulated.yaml", "--set", "environment.agent={command: [nobody]}")
    _, output = sf(*plan)
    assert "the program 'nobody' does not exist on this host" in output
    _, output = sf(*plan, "--set", "cluster.scheduler=tcp://127.0.0.1:9")
    assert "cluster.scheduler names tcp://127.0.0.1:9, but nothing answers there" in output


def test_a_missing_configuration_is_named(tmp_path: Path) -> None:
    code, output = sf("train", str(tmp_path / "none.yaml"))
    assert code == 2
    assert "none.yaml: no such file" in output


def test_a_name_that_is_not_known_is_told_those_that_are() -> None:
    sentence = "grpp: no such file; give the path of a YAML file or the name of a built-in configuration: "
    for command in ("train", "plan", "up"):
        code, output = sf(command, "grpp")
        assert (code, sentence + ", ".join(builtin_configs()) in output) == (2, True), output


def test_a_recipe_is_planned_by_its_name() -> None:
    (code, by_name) = sf("plan", "gspo")
    (_, by_path) = sf("plan", "configs/recipes/gspo.yaml")
    assert without_time(by_name) == without_time(by_path)
    assert code == 0


def test_the_version_is_printed() -> None:
    assert sf("--version") == (0, f"seamlessflow {version('seamlessflow')}")


def test_inspecting_nothing_says_so(tmp_path: Path) -> None:
    code, output = sf("inspect", str(tmp_path / "nothing"))
    assert code == 2
    assert "no run" in output


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


def test_a_data_plane_for_the_network_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SF_DATAPLANE_KEY", raising=False)
    code, output = sf("dataplane", "--host", "0.0.0.0")
    assert code == 2
    assert "SF_DATAPLANE_KEY" in output


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("server", "set PREFECT_SERVER_API_AUTH_STRING to USER:PASSWORD, or serve on 127.0.0.1"),
        (
            "scheduler",
            "distributed.comm.tls.ca-file and distributed.comm.tls.scheduler.cert, or bind to 127.0.0.1",
        ),
    ],
)
def test_a_server_for_the_network_needs_a_password_or_certificates(
    monkeypatch: pytest.MonkeyPatch, command: str, sentence: str
) -> None:
    monkeypatch.delenv("PREFECT_SERVER_API_AUTH_STRING", raising=False)
    code, output = sf(command, "--host", "0.0.0.0")
    assert (code, sentence in output) == (2, True), output


def test_a_worker_with_certificates_is_not_open_to_a_scheduler_without() -> None:
    with dask.config.set({"distributed.comm.tls": {"ca-file": "ca.pem", "worker": {"cert": "host.pem"}}}):
        code, output = sf(
            "worker", "--host", "0.0.0.0", "--tags", "cpu", "--scheduler", "tcp://192.0.2.1:8786"
        )
    assert (code, "use a tls:// scheduler, got tcp://192.0.2.1:8786" in output) == (2, True), output


def test_a_client_without_certificates_is_told_before_it_connects() -> None:
    code, output = sf("worker", "--tags", "cpu", "--scheduler", "tls://192.0.2.1:8786")
    assert code == 2
    assert "tls://192.0.2.1:8786 cannot be reached without certificates" in output


@pytest.mark.parametrize("command", ["resume", "evaluate"])
def test_only_a_run_is_resumed_or_evaluated(tmp_path: Path, command: str) -> None:
    code, output = sf(command, str(tmp_path))
    assert code == 2
    assert "no run here (config.json is missing)" in output


def test_a_server_to_set_up_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    code, output = sf("setup-server")
    assert code == 2
    assert "PREFECT_API_URL is not set" in output


def test_a_table_in_a_pipe_is_not_cut(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path / "run-1"))
    configure(run)
    figures = {name: 1234.0 for name in DEVICE_COLUMNS} | {f"idle_node-{i}.cluster": 1.0 for i in range(8)}
    for number in range(11):
        commit(run, number, "filter", data={"lags": [1]})
        write_metrics(run, "devices", number, [figures])
    environment = {name: value for name, value in os.environ.items() if name != "DEVICE_COLUMNS"}
    command = [sys.executable, "-m", "sf_core", "inspect", run.uri]
    output = subprocess.run(
        command, env=environment, capture_output=True, check=True, encoding="utf-8"
    ).stdout
    assert "\N{HORIZONTAL ELLIPSIS}" not in output
    [row] = [line for line in output.splitlines() if line.startswith("10") and "100%" in line]
    assert row.split()[1:9] == ["100%"] * 8
