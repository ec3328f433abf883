"""The command `sf`. Parses, starts what is missing, shows progress and prints results; no logic of its."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from sf_core.cli_data import commands as data_commands
from sf_core.config import ConfigError, RunConfig, worker_config
from sf_core.config_file import load_config
from sf_core.dataplane.journal import Fsync
from sf_core.terminal import console, errors
from sf_core.terminal import fail as _fail

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(data_commands)

ConfigFile = Annotated[Path, typer.Argument(help="YAML configuration.", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="key.path=value, as often as needed.", show_default=False)
]
RunDir = Annotated[str, typer.Argument(help="Run directory.", show_default=False)]


@app.command()
def train(config: ConfigFile, overrides: Overrides = None) -> None:
    """Train an agent's policy; the same run_id goes on where it stopped."""
    _launch("train", _config(config, overrides))


@app.command()
def evaluate(config: ConfigFile, overrides: Overrides = None) -> None:
    """Measure a run's newest policy on the held-out tasks."""
    settings = _config(config, overrides)
    if settings.run_id is None:
        _fail("run_id: say which run to evaluate, for example --set run_id=NAME")
    _launch("evaluate", settings)


@app.command()
def inspect(
    run: RunDir,
    session: Annotated[str | None, typer.Option(help="Show one session.")] = None,
    timeline: Annotated[
        bool, typer.Option("--timeline", help="Show the devices; write timeline.json and .png.")
    ] = False,
) -> None:
    """Show a run's iterations and devices, or one session turn by turn, from the run directory alone."""
    from sf_core.inspect import inspect_run, inspect_session, inspect_timeline

    try:
        if session is not None:
            view = inspect_session(run, session)
        else:
            view = inspect_timeline(run) if timeline else inspect_run(run)
        console.print(view)
    except (ValueError, OSError) as error:
        _fail(str(error))


@app.command()
def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    scheduler: Annotated[
        str | None, typer.Option(help="Dask scheduler; by default the configuration's.", show_default=False)
    ] = None,
    measured: Annotated[
        str | None, typer.Option(help="Directory of a run whose times are used.", show_default=False)
    ] = None,
) -> None:
    """Say what would run where and why, without starting anything."""
    from sf_core.scheduling.explain import explain_plan

    settings = _config(config, overrides)
    try:
        console.print(explain_plan(settings, scheduler=scheduler, measured=measured))
    except ValueError as error:
        _fail(str(error))


@app.command()
def worker(
    scheduler: Annotated[str, typer.Option(help="Address of the Dask scheduler.", show_default=False)],
    tags: Annotated[str, typer.Option(help="What it can do, for example rollout,train.", show_default=False)],
    device: Annotated[str, typer.Option(help="cpu, or cuda:N.")] = "cpu",
    device_kind: Annotated[
        str | None, typer.Option(help="What that is, for example h100.", show_default=False)
    ] = None,
    probe: Annotated[bool, typer.Option("--probe", help="Measure the device; takes seconds.")] = False,
    name: Annotated[str | None, typer.Option(help="By default from host and device.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of numerical libraries.")] = None,
    host: Annotated[str, typer.Option(help="Address; others than loopback need TLS.")] = "127.0.0.1",
) -> None:
    """Be a Dask worker for one device, until told to stop."""
    from sf_core.scheduling.worker import become_worker

    words = [tag.strip() for tag in tags.split(",")]
    try:
        settings = worker_config(tags=words, device=device, device_kind=device_kind, threads=threads)
        become_worker(scheduler, settings, name=name, host=host, probe=probe)
    except ValueError as error:
        _fail(str(error))


@app.command()
def dataplane(
    host: Annotated[str, typer.Option(help="Address; others than loopback need a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 picks a free one.")] = 8700,
    journal_dir: Annotated[
        str | None, typer.Option(help="Folder of its own; started with it again, it goes on with its runs.")
    ] = None,
    fsync: Annotated[
        Fsync, typer.Option(help="On disk before it is forwarded: turns, chunks of streams too, or grouped.")
    ] = "turn",
    grace_s: Annotated[float, typer.Option(help="A turn goes on for so long without its client.")] = 10.0,
    gateways: Annotated[int, typer.Option(min=1, help="Processes that serve turns; 1: all in one.")] = 1,
    memory_mb: Annotated[
        float, typer.Option(help="For sessions and results; over it, those nobody uses wait on disk.")
    ] = 2048,
) -> None:
    """Serve a data plane for many runs. Its key is read from SF_DATAPLANE_KEY."""
    from sf_core.dataplane.server import serve
    from sf_core.settings import dataplane_key

    try:
        serve(
            host,
            port,
            key=dataplane_key(),
            journal_dir=journal_dir,
            fsync=fsync,
            grace_s=grace_s,
            memory_mb=memory_mb,
            num_gateways=gateways,
        )
    except ValueError as error:
        _fail(str(error))


def _config(path: Path, overrides: list[str] | None) -> RunConfig:
    from sf_core.run import load_object

    try:
        config = load_config(path, overrides)
        sys.path.insert(0, os.getcwd())
        for reference in (config.environment.tasks, config.environment.agent, config.environment.reward):
            load_object(reference)
    except ConfigError as error:
        _fail(str(error))
    except ValueError as error:
        _fail(f"{path}: environment: {error}")
    model = config.policy.model
    if model is not None and not (Path(model) / "config.json").is_file():
        _fail(f"{path}: policy.model: {model} is not a Hugging Face model folder (no config.json)")
    return config


def _launch(flow: str, config: RunConfig) -> None:
    from sf_core.launch import LaunchError, launch

    signal.signal(signal.SIGTERM, _interrupt)
    try:
        launch(flow, config, console)
    except LaunchError as error:
        errors.print(f"[red]error:[/red] {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except OSError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def main() -> None:
    app()
