"""Runs a sweep from the terminal: one stack for all of its runs, and the flow. Prints the table of the sweep,
what is missing, and where its chart is.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sf_core.cli.arguments.services import check_services
from sf_core.cli.live import LineProgress, NewLines
from sf_core.cli.stack.command_lock import HeldError, hold_folder
from sf_core.cli.stack.local import Services, local_stack, name_started, start_services
from sf_core.cli.stack.processes import Part
from sf_core.cli.stack.supervisor import StackError, Supervisor
from sf_core.config import RunConfig
from sf_core.engines.registry import engine_kind
from sf_core.process.environment_variables import (
    count_gpus,
    dataplane_url,
    prefect_api_url,
)
from sf_core.process.import_path import import_from, python_module
from sf_core.reports.tables import make_printable, make_table
from sf_core.scheduling.cluster import find_workers, scheduler_of, workers_here
from sf_core.scheduling.plan import make_plan
from sf_core.stages.preflight.checks import preflight
from sf_core.stages.preflight.facts import SPLITS, Facts
from sf_core.stages.preflight.sizes import PolicySizes, bytes_of_two_workers
from sf_core.stages.sweeps.expansion import SweepRequest
from sf_core.stages.sweeps.results import (
    HEADINGS,
    LEGEND,
    count_states,
    describe_states,
    draw,
    list_faults,
    read_results,
    setting_row,
    unfinished,
)
from sf_core.stages.sweeps.sweep import OpenSweep, copy_workers
from sf_core.training.backends import trainer_kind
from storage.errors import StorageError
from storage.files import write_atomic
from storage.run_directory import RunDirectory


def print_sweep(opened: OpenSweep, console: Console) -> list[str]:
    """Print the table and write the picture; returns the lines below the table."""
    results = read_results(opened)
    table: Table = make_table(f"sweep {opened.sweep.name}: {describe_states(results)}")
    table.add_column(HEADINGS[0])
    for heading in HEADINGS[1:]:
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        table.add_row(*(Text(make_printable(cell)) for cell in setting_row(result)))
    console.print(table)
    picture = opened.folder.path("summary.png")
    write_atomic(picture, draw(opened, results))
    return [LEGEND, *map(make_printable, list_faults(results)), f"picture  {picture}"]


LOOK_S = 0.4

FREED_S = 30.0
"""Time for the runs to free the workers of a cluster that stays before they are killed."""


class SweepError(RuntimeError):
    """The sweep is not finished; the message says why, and how to continue it."""


def launch_sweep(opened: OpenSweep, at_once: int | None, console: Console) -> None:
    """Run what is left of the sweep, and print its table. In any case, every process started here has ended
    afterwards."""
    name = opened.sweep.name
    left = unfinished(opened)
    num_runs = len(opened.sweep.runs)
    if not left:
        console.print(f"sweep {name}: all {num_runs} runs are finished", soft_wrap=True)
        return _print(opened, console)
    first = opened.configs[0]
    try:
        check_services(first)
        preflight(Facts(first, starts_services=True))
    except ValueError as error:
        raise SweepError(str(error)) from None
    worker_bytes = max(bytes_of_two_workers(PolicySizes.of(config)) for config in opened.configs)
    directory = RunDirectory(opened.folder.uri)
    local = Path(directory.local_dir)
    local.mkdir(parents=True, exist_ok=True)
    try:
        lock = hold_folder(local, f"sweep {name}", "to begin another sweep, add --name NAME")
    except HeldError as error:
        raise SweepError(str(error)) from None
    done = f", {num_runs - len(left)} of them finished" if len(left) < num_runs else ""
    console.print(f"sweep {name} in {opened.folder.uri}: {num_runs} runs{done}", soft_wrap=True)
    with lock, ExitStack() as ended, local_stack(local / "logs", _environment(opened.configs)) as stack:
        if scheduler_of(first) is not None:
            stack.stop_s = FREED_S
        try:
            code = _run(opened, at_once, worker_bytes, stack, ended, local, console)
        except StackError as error:
            raise SweepError(str(error)) from None
        except KeyboardInterrupt:
            console.print(f"stopped; {_how_to_go_on(opened)}", soft_wrap=True)
            raise
    _print(opened, console)
    results = read_results(opened)
    if count_states(results)["finished"] < num_runs:
        log = local / "logs" / "flow-sweep.log"
        raise SweepError(f"{describe_states(results)}; {_how_to_go_on(opened)}; log: {log}")
    if code:
        raise SweepError(f"the flow of the sweep ended with code {code}; log: {local / 'logs'}")


def check_config(config: RunConfig) -> None:
    """Raises ValueError or OSError, one sentence, if a run cannot begin here."""
    import_from([os.getcwd()])
    facts = Facts(config, splits=SPLITS, starts_services=True)
    preflight(facts)
    facts.workers = find_workers(config, worker_bytes=bytes_of_two_workers(facts.sizes))
    if scheduler_of(config) is None:
        make_plan(facts.workers, config)
    preflight(facts)


def _environment(configs: list[RunConfig]) -> dict[str, str]:
    computes = any(engine_kind(c).needs_torch or trainer_kind(c).computes_weights for c in configs)
    return {} if computes else {"SF_EMULATED": "1"}


def _run(
    opened: OpenSweep,
    at_once: int | None,
    worker_bytes: int,
    stack: Supervisor,
    ended: ExitStack,
    local: Path,
    console: Console,
) -> int:
    """Start the services and the flow, and wait for its end; returns its exit code."""
    config = opened.configs[0]
    dataplane = config.dataplane.url or dataplane_url()
    progress = LineProgress(console)
    if started := name_started(prefect_api_url(), scheduler_of(config), dataplane):
        progress.show_status(f"starting {started}")
    ready = start_services(
        stack,
        local,
        copy_workers(
            workers_here(config, worker_bytes),
            count_gpus(),
            at_once,
            may_move=all(worker.device is None for worker in config.cluster.workers.values()),
        ),
        api=prefect_api_url(),
        scheduler=scheduler_of(config),
        dataplane=dataplane,
    )
    services = ready()
    if dataplane is None:
        ended.callback(_note_end, opened, services.dataplane)
    progress.show_status(f"watch it at {services.api.removesuffix('/api')}")
    return _run_flow(opened, at_once, stack, services, progress.hear)


def _run_flow(
    opened: OpenSweep,
    at_once: int | None,
    stack: Supervisor,
    services: Services,
    hear: Callable[[str], None],
) -> int:
    request = SweepRequest(
        config=None, name=opened.sweep.name, root=opened.folder.root, at_once=at_once
    ).model_dump_json()
    command = python_module("flows.sweep", request)
    logged = NewLines(stack.logs / "flow-sweep.log")
    [process] = stack.start(Part("flow-sweep", command, services.addresses, once=True))
    try:
        while True:
            # before reading the log, so that its last lines are read too
            code = process.code()
            for line in logged.read():
                hear(line)
            if code is not None:
                return code
            time.sleep(LOOK_S)
    finally:
        # first: the flow would report the loss of everything else as errors
        stack.remove(process)


def _note_end(opened: OpenSweep, dataplane: str) -> None:
    """Record that the data plane has ended, so that nothing waits for its restart."""
    for run in opened.sweep.runs:
        directory = opened.directory(run)
        with suppress(ValueError, StorageError):
            if directory.exists():
                directory.end_attempt(dataplane, socket.gethostname())


def _how_to_go_on(opened: OpenSweep) -> str:
    folder = opened.folder
    is_found = folder.root == RunDirectory("runs").uri
    return f"continue with `sf sweep --resume {folder.name if is_found else folder.uri}`"


def _print(opened: OpenSweep, console: Console) -> None:
    for line in print_sweep(opened, console):
        console.print(line, soft_wrap=True)
