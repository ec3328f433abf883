"""The commands that each run one part of a cluster, on any machine: servers and workers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sf_core.cli.arguments.addresses import AnyPort, Port, address
from sf_core.cli.arguments.groups import App
from sf_core.cli.terminal import fail, report_bad_input
from sf_core.config.addresses import LOOPBACK
from sf_core.dataplane.options import DataplaneOptions, Fsync

commands = App()


@commands.command("key")
@report_bad_input()
def show_key() -> None:
    """Print the key that opens every route of the data planes of this account.

    The key is the value of SF_DATAPLANE_KEY. Without this variable, the key is in a file that only your
    account can read. The command creates this file if the file does not exist.
    """
    from sf_core.dataplane.operator_key import account_key
    from sf_core.process.environment_variables import configured_dataplane_key

    print(configured_dataplane_key() or account_key())


@commands.command()
@report_bad_input()
def server(
    host: Annotated[str, address("a password")] = LOOPBACK,
    port: Annotated[int, Port] = 4200,
) -> None:
    """Run a Prefect server.

    If the environment contains PREFECT_SERVER_API_AUTH_STRING=USER:PASSWORD, clients need this login.
    """
    from sf_core.cli.stack.host_processes import become_prefect_server

    become_prefect_server(host, port)


@commands.command()
@report_bad_input()
def scheduler(
    host: Annotated[str, address("TLS")] = LOOPBACK,
    port: Annotated[int, Port] = 8786,
) -> None:
    """Run the Dask scheduler of a cluster."""
    from sf_core.cli.stack.host_processes import become_scheduler

    become_scheduler(host, port)


@commands.command()
@report_bad_input()
def worker(
    scheduler: Annotated[str, typer.Option(help="Address of the Dask scheduler.")],
    tags: Annotated[str, typer.Option(help="Capability tags of the worker, for example rollout,train.")],
    device: Annotated[
        str | None,
        typer.Option(
            help="Device of the worker: cpu or cuda:N. By default the GPU if the worker is tagged rollout or "
            "train and the host has a GPU, cpu if not."
        ),
    ] = None,
    device_kind: Annotated[str | None, typer.Option(help="Kind of the device, for example h100.")] = None,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe", help="Measure the speed of the device when the worker starts (a few seconds)."
        ),
    ] = False,
    name: Annotated[
        str | None, typer.Option(help="Name of the worker. By default host name and device.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="Number of CPU threads that numerical libraries use.")
    ] = None,
    host: Annotated[str, address("TLS")] = LOOPBACK,
) -> None:
    """Run a Dask worker for one device."""
    from sf_core.config.validation import worker_config
    from sf_core.scheduling.worker import become_worker

    words = [tag.strip() for tag in tags.split(",")]
    settings = worker_config(tags=words, device=device, device_kind=device_kind, threads=threads)
    become_worker(scheduler, settings, name=name, host=host, probe=probe)


@commands.command()
@report_bad_input()
def dataplane(
    host: Annotated[str, address("a key")] = LOOPBACK,
    port: Annotated[int, AnyPort] = 8700,
    journal_dir: Annotated[
        str | None,
        typer.Option(
            help="Folder for the journals of runs. After a restart with the same folder, the data plane "
            "continues the runs."
        ),
    ] = None,
    fsync: Annotated[
        Fsync,
        typer.Option(
            help="Time at which the journal is flushed to disk. turn: before the agent gets the answer. "
            "chunk: also before the agent gets each chunk of a stream. group: like turn, but turns that end "
            "within 5 ms share one flush."
        ),
    ] = DataplaneOptions.fsync,
    grace_s: Annotated[
        float,
        typer.Option(
            min=0, help="Time, in seconds, for which a turn continues after the client has disconnected."
        ),
    ] = DataplaneOptions.grace_s,
    memory_mb: Annotated[
        float,
        typer.Option(
            help="Memory limit for sessions and results, in MB. At the limit no new session starts."
        ),
    ] = DataplaneOptions.memory_mb,
    max_connections: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of open connections. By default the limit on open files (`ulimit -n`), less "
            "a quarter, at most 1024, for journals and tables."
        ),
    ] = DataplaneOptions.max_connections,
    request_timeout_s: Annotated[
        float,
        typer.Option(
            help="Time, in seconds, within which a client must send the headers of a request. After the "
            "headers, the time between two parts of the body. Answers have no such limit."
        ),
    ] = DataplaneOptions.request_timeout_s,
    port_file: Annotated[str | None, typer.Option(help="File to which the port is written.")] = None,
    gateways: Annotated[int, typer.Option(hidden=True)] = 1,
) -> None:
    """Run a data plane, the process between agents and engines. One data plane can serve many runs.

    The environment variable SF_DATAPLANE_KEY sets the key that opens every route. Without this variable, the
    data plane uses the key that `sf key` prints, and clients on this machine can open sessions without a key.
    """
    from sf_core.dataplane.operator_key import account_key
    from sf_core.dataplane.server import serve
    from sf_core.process.environment_variables import (
        allowed_hosts,
        configured_dataplane_key,
        why_not_writable,
    )

    if gateways != 1:
        fail(
            f"--gateways {gateways} is not supported: a data plane is one process; for more load start "
            "several data planes with different --port, and give each run the URL of one data plane (--set "
            "dataplane.url=http://HOST:PORT)"
        )
    if journal_dir is not None and (reason := why_not_writable(Path(journal_dir))):
        fail(f"--journal-dir {journal_dir} cannot be written ({reason}): name another folder")
    options = DataplaneOptions(
        journal_dir,
        fsync,
        grace_s,
        memory_mb,
        tuple(allowed_hosts()),
        max_connections,
        request_timeout_s,
    )
    key = configured_dataplane_key()
    serve(
        host,
        port,
        options,
        key=key or account_key(),
        welcomes_strangers=key is None,
        port_file=port_file,
    )
