"""`sf up` and `sf down`: a whole stack on this machine that stays up without a terminal.

Configuration, logs and journals of the stack are in one folder.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from xmlrpc.client import Fault

import psutil

from sf_core.cli.stack import processes
from sf_core.cli.stack.local import Ports, Services, stack_environment, start_services
from sf_core.cli.stack.supervisor import StackError, Supervisor, call, end, read_pid
from sf_core.config import WorkerConfig
from sf_core.config.addresses import LOOPBACK, check_free
from sf_core.process.child_processes import FLOW_RUN, end_marked, find_carriers
from sf_core.process.environment_variables import (
    CACHE_DIR,
    PREFECT_HOME,
    cache_dir,
    check_place,
    prefect_home,
    why_not_writable,
)
from sf_core.process.import_path import python_module
from sf_core.process.limits import check_open_files

POOL = "sf"
"""Work pool of the Prefect server from which the stack takes flow runs."""

RETRIES = 2
"""Maximum restarts of a flow run that crashed, or whose stack or machine did."""

STOP_S = 15.0
"""Time for a part to end before it is killed."""

DEPLOY_S = 300.0
"""Time limit of a command that configures the Prefect server."""

PATIENT = {"PREFECT_CLIENT_MAX_RETRIES": "30"}
"""Prefect's client gives up after 5 refusals. A server on SQLite gives more of them on a busy disk
(tasks/prefect_server.py), so the time limit decides."""

DEPLOYMENTS = Path(__file__).with_name("prefect.yaml")
"""Our own file, because the folder in which the command is called may have another one. A link in a clone."""


def up(
    folder: Path, workers: Mapping[str, WorkerConfig], ports: Ports, report: Callable[[str], None]
) -> Services:
    """Start the stack and return when all of it answers. On failure nothing of the stack is left, and
    StackError is raised with one sentence."""
    if read_pid(folder) is not None:
        raise StackError(f"a stack already runs in {folder}; stop it with `sf down`")
    # processes that a killed supervisor has left, such as a flow
    end_marked(str(folder))
    check_open_files()
    check_place(prefect_home(), *PREFECT_HOME)
    check_place(cache_dir(), *CACHE_DIR)
    for part in ("prefect", "scheduler", "dataplane"):
        check_free(LOOPBACK, getattr(ports, part), f"--{part}-port")
    # Prefect imports from the working directory of a flow first, so that is an empty one, which flows leave
    home = folder / "home"
    folders = {"SF_HOME": str(home), "SF_FLOW_FOLDER": os.getcwd()}
    environment = stack_environment() | folders | ports.services.addresses
    stack = Supervisor(folder, folder / "logs", environment, stays=True, stop_s=STOP_S)
    _check_writable(folder)
    home.mkdir(exist_ok=True)
    try:
        report("waiting for Prefect, Dask and the data plane")
        services = start_services(stack, folder, workers, ports=ports, for_deployments=True)()
        report("deploying")
        _call(stack.env, "sf_core", "setup-server", "--retries", str(RETRIES))
        for line in _call(stack.env, "tasks.lost_runs", "up", POOL, str(RETRIES)):
            report(line)
        stack.start(processes.prefect_worker(POOL))
        deploy = ("prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(DEPLOYMENTS))
        _call(stack.env, *deploy, folder=home)
    except BaseException:
        stack.stop()
        raise
    return services


def down(folder: Path, report: Callable[[str], None]) -> bool:
    """End everything that the stack started; False if nothing was running."""
    with suppress(OSError, HTTPException, Fault, psutil.Error, StackError):
        _end_runs(folder, report)
    return end(folder, STOP_S)


def _end_runs(folder: Path, report: Callable[[str], None]) -> None:
    """End the process worker and its flow runs while the server can record it; otherwise they would stay
    Running for ever, and no other run would start."""
    worker = psutil.Process(call(folder, "getProcessInfo", processes.PREFECT_WORKER)["pid"])
    environment = worker.environ()
    started = worker.children(recursive=True)
    runs = {process: run for process, run in find_carriers(FLOW_RUN) if process in started}
    if not runs:
        return
    # first, or the worker would start the next run
    call(folder, "stopProcess", processes.PREFECT_WORKER, patience_s=STOP_S)
    for process in runs:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(runs, STOP_S)
    for line in _call(environment, "tasks.lost_runs", "down", *set(runs.values())):
        report(line)


def _check_writable(folder: Path) -> None:
    if reason := why_not_writable(folder):
        raise StackError(f"{folder} cannot be written ({reason}); choose another --folder")


def _call(environment: dict[str, str], *module: str, folder: Path | None = None) -> list[str]:
    """Run a Python module, in this folder; returns the lines that it prints."""
    command = python_module(*module)
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment | PATIENT,
            capture_output=True,
            timeout=DEPLOY_S,
            encoding="utf-8",
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        raise StackError(f"{' '.join(module)} did not end within {DEPLOY_S:.0f} s") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        # httpx ends the text of a refusal with a link to what its status means
        lines = [line for line in lines if not line.startswith("For more information check:")]
        raise StackError(
            f"{' '.join(module)} failed: {lines[-1] if lines else f'exit status {done.returncode}'}"
        )
    return done.stdout.splitlines()
