"""The commands that each run one part of a cluster, on any machine: servers and workers."""

from __future__ import annotations

from typing import Annotated

import typer

from sf_core.cli.terminal import fail, report_bad_input
from sf_core.config.addresses import MAX_PORT
from sf_core.dataplane.options import DataplaneOptions, Fsync

commands = typer.Typer()


@commands.command()
@report_bad_input()
def server(
    host: Annotated[str, typer.Option(help="Address; others than loopback need a password.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=MAX_PORT)] = 4200,
) -> None:
    """Run a Prefect server. Set PREFECT_SERVER_API_AUTH_STRING=USER:PASSWORD to require a login."""
    from sf_core.cli.host_processes import become_prefect_server

    become_prefect_server(host, port)


@commands.command()
@report_bad_input()
def scheduler(
    host: Annotated[str, typer.Option(help="Address; others than loopback need TLS.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=MAX_PORT)] = 8786,
) -> None:
    """Be the Dask scheduler of a cluster."""
    from sf_core.cli.host_processes import become_scheduler

    become_scheduler(host, port)


@commands.command()
@report_bad_input()
def worker(
    scheduler: Annotated[str, typer.Option(help="Address of the Dask scheduler.", show_default=False)],
    tags: Annotated[str, typer.Option(help="What it can do, for example rollout,train.", show_default=False)],
    device: Annotated[
        str | None,
        typer.Option(help="cpu or cuda:N. By default the GPU for tags rollout and train, else cpu."),
    ] = None,
    device_kind: Annotated[
        str | None, typer.Option(help="What that is, for example h100.", show_default=False)
    ] = None,
    probe: Annotated[bool, typer.Option("--probe", help="Measure the device; takes seconds.")] = False,
    name: Annotated[str | None, typer.Option(help="By default from host and device.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of numerical libraries.")] = None,
    host: Annotated[str, typer.Option(help="Address; others than loopback need TLS.")] = "127.0.0.1",
) -> None:
    """Be a Dask worker for one device, until told to stop."""
    from sf_core.config.validation import worker_config
    from sf_core.scheduling.worker import become_worker

    words = [tag.strip() for tag in tags.split(",")]
    settings = worker_config(tags=words, device=device, device_kind=device_kind, threads=threads)
    become_worker(scheduler, settings, name=name, host=host, probe=probe)


@commands.command()
@report_bad_input()
def dataplane(
    host: Annotated[str, typer.Option(help="Address; others than loopback need a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=MAX_PORT, help="Port; 0 picks a free one.")] = 8700,
    journal_dir: Annotated[
        str | None, typer.Option(help="Folder of its own; started with it again, it goes on with its runs.")
    ] = None,
    fsync: Annotated[
        Fsync, typer.Option(help="On disk before it is forwarded: turns, chunks of streams too, or grouped.")
    ] = DataplaneOptions.fsync,
    grace_s: Annotated[
        float, typer.Option(min=0, help="A turn goes on for so long without its client.")
    ] = DataplaneOptions.grace_s,
    memory_mb: Annotated[
        float, typer.Option(help="For sessions and results; above it nothing new is begun.")
    ] = DataplaneOptions.memory_mb,
    port_file: Annotated[str | None, typer.Option(help="File for the port, written once it is open.")] = None,
    gateways: Annotated[int, typer.Option(hidden=True)] = 1,
) -> None:
    """Serve a data plane for many runs. Its key is read from SF_DATAPLANE_KEY."""
    from sf_core.dataplane.server import serve
    from sf_core.surroundings import dataplane_key

    if gateways != 1:
        fail(
            f"--gateways {gateways}: a data plane is one process; for more load start several, each with a "
            "--port of its own, and give every run one of them (--set dataplane.url=http://HOST:PORT)"
        )
    options = DataplaneOptions(journal_dir, fsync, grace_s, memory_mb)
    try:
        serve(host, port, options, port_file=port_file, key=dataplane_key())
    except OSError as error:
        fail(f"{host}:{port} cannot be served: {error}")
