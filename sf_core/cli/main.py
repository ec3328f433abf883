"""The command `sf`: parses arguments, calls the code that does the work, and prints results and errors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from sf_core.cli.hosts import commands as host_commands
from sf_core.cli.model import commands as model_commands
from sf_core.cli.runs import AsJson, RunDir
from sf_core.cli.runs import commands as data_commands
from sf_core.cli.serving.command import commands as serve_commands
from sf_core.cli.terminal import console, errors, interrupt, print_json, report_bad_input, say_error
from sf_core.cli.terminal import fail as _fail
from sf_core.config import RunConfig
from sf_core.config.addresses import MAX_PORT
from sf_core.config.programs import Command
from sf_core.config.yaml_file import builtin_configs, load_config, override_config
from sf_core.surroundings import STACK_FOLDER

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(serve_commands)
app.add_typer(host_commands)
app.add_typer(data_commands)
app.add_typer(model_commands)

NAMES = f"or the name of one that is built in: {', '.join(builtin_configs())}"
ConfigFile = Annotated[
    list[Path],
    typer.Argument(
        help=f"YAML configuration, {NAMES}. Later ones override earlier ones.",
        show_default=False,
    ),
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="key.path=value, as often as needed.", show_default=False)
]
StackFolder = Annotated[Path, typer.Option(help="Configuration, logs and journals of the stack.")]


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"seamlessflow {version('seamlessflow')}")
        raise typer.Exit


@app.callback()
def sf(
    asked: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Reinforcement learning for LLM agents as a workflow on Prefect and Dask."""


@app.command("init")
@report_bad_input()
def init_project(
    name: Annotated[str, typer.Argument(help="New folder; its module is named like it.", show_default=False)],
) -> None:
    """Write a small project of your own: tasks, an agent, a reward, their test, and a configuration."""
    from sf_core.cli.project.create import create_project

    try:
        files = create_project(name)
    except OSError as error:
        _fail(f"{name}: cannot be written: {error.strerror}")
    for file in files:
        print(file)
    print(f"cd {files[0].parent} && sf try train.yaml && sf train train.yaml")


@app.command()
def train(config: ConfigFile, overrides: Overrides = None) -> None:
    """Train an agent's policy; an existing run_id resumes where it stopped."""
    _launch("train", _config(config, overrides))


@app.command()
def resume(run: RunDir) -> None:
    """Resume a run that stopped, as it was configured."""
    _launch("train", _read_stored(run))


@app.command("try")
@report_bad_input()
def try_agent(
    config: ConfigFile,
    overrides: Overrides = None,
    index: Annotated[int, typer.Option(min=0, help="Index of the task.")] = 0,
    split: Annotated[Literal["train", "holdout"], typer.Option(help="Split of the task.")] = "train",
    endpoint: Annotated[
        str | None,
        typer.Option(
            help="Base URL of any OpenAI-compatible endpoint, such as a running data plane; its key is read "
            "from OPENAI_API_KEY. By default the policy of the configuration is served.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="Model to ask for at --endpoint.")] = "policy",
) -> None:
    """Run the agent on one task, without a stack: conversation, answer, reward. Trains nothing."""
    from sf_core.cli.serving.mistakes import PhaseError
    from sf_core.cli.serving.trial import try_one
    from sf_core.surroundings import openai_key
    from sf_core.types import Endpoint

    settings = _config(config, overrides)
    elsewhere = None if endpoint is None else Endpoint(endpoint, openai_key() or "none", model)
    try:
        try_one(settings, split, index, elsewhere, console)
    except PhaseError as error:
        errors.print(error.traceback(), end="", soft_wrap=True)
        say_error(error.sentence())
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@app.command()
def evaluate(
    run: RunDir,
    overrides: Overrides = None,
    version: Annotated[
        int | None, typer.Option(min=0, help="Policy version; by default the newest.", show_default=False)
    ] = None,
    against: Annotated[
        int | None,
        typer.Option(min=0, help="Compare with this version, on equal tasks and seeds.", show_default=False),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSONL file of prompts to answer instead of held-out tasks.", show_default=False),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Measure apart, and print the result as JSON and nothing else.")
    ] = False,
) -> None:
    """Measure a run's newest policy on the held-out tasks, as the run was configured; trains nothing. With
    another version, other tasks or other settings, the result is kept in RUN/evaluations/_measured."""
    from sf_core.cli.evaluate import evaluate_apart, is_plain

    changes = list(overrides or [])
    if is_plain(version, against, prompts, changes) and not as_json:
        _launch("evaluate", _read_stored(run, overrides))
        return

    def measure(config: RunConfig) -> None:
        _launch("evaluate", _runnable(config, run), errors if as_json else console, says_result=False)

    with report_bad_input():
        result = evaluate_apart(run, version, against, prompts, changes, measure)
        print(result.as_json()) if as_json else console.print(result.as_table())


@app.command()
def up(
    config: Annotated[
        list[Path] | None,
        typer.Argument(
            help="YAML configuration, or the name of one that is built in, with cluster.workers.",
            show_default=False,
        ),
    ] = None,
    folder: StackFolder = STACK_FOLDER,
    prefect_port: Annotated[int, typer.Option(min=1, max=MAX_PORT)] = 4200,
    scheduler_port: Annotated[int, typer.Option(min=1, max=MAX_PORT)] = 8786,
    dataplane_port: Annotated[int, typer.Option(min=1, max=MAX_PORT)] = 8700,
) -> None:
    """Start a whole stack that stays up, with our deployments; `sf down` ends it."""
    from sf_core.cli.stack.local import Ports
    from sf_core.cli.stack.standing import up as bring_up
    from sf_core.cli.stack.supervisor import StackError
    from sf_core.scheduling.cluster import workers_here

    workers = workers_here(_config(config, None) if config else RunConfig())
    ports = Ports(prefect_port, scheduler_port, dataplane_port)
    try:
        services = bring_up(folder.resolve(), workers, ports, console.print)
    except (StackError, OSError) as error:
        _fail(str(error))
    console.print(
        f"Prefect UI   {services.api.removesuffix('/api')}\n"
        f"scheduler    {services.scheduler}\n"
        f"data plane   {services.dataplane}\n"
        f"logs         {folder.resolve() / 'logs'}\n"
        "for sf train to use it:\n"
        + "\n".join(f"export {name}={address}" for name, address in services.addresses.items()),
        soft_wrap=True,
    )


@app.command()
def down(folder: StackFolder = STACK_FOLDER) -> None:
    """End what `sf up` started, and nothing else."""
    from sf_core.cli.stack.standing import down as bring_down

    was_up = bring_down(folder.resolve(), console.print)
    console.print("the stack is down" if was_up else f"no stack is up in {folder}")


@app.command("setup-server")
def setup_server(
    pool: Annotated[str, typer.Option(help="Work pool of this cluster.")] = "sf",
    retries: Annotated[int, typer.Option(min=0, help="A crashed run is started again so often.")] = 2,
    silence_s: Annotated[
        float, typer.Option(min=10, help="Without a heartbeat for so long, a run has crashed.")
    ] = 540,
) -> None:
    """Create or update what we need on the Prefect server at PREFECT_API_URL: work pool, automations."""
    from sf_core.surroundings import prefect_api_url

    if prefect_api_url() is None:
        _fail("PREFECT_API_URL is not set: name the Prefect server, for example http://127.0.0.1:4200/api")
    command = [sys.executable, "-m", "tasks.server", pool, str(retries), str(silence_s)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        _fail(done.stderr.strip())


@app.command()
@report_bad_input()
def inspect(
    run: RunDir,
    session: Annotated[str | None, typer.Option(help="Show one session.")] = None,
    timeline: Annotated[
        bool, typer.Option("--timeline", help="Show the devices; write timeline.json and .png.")
    ] = False,
    tasks: Annotated[
        bool, typer.Option("--tasks", help="Show the tasks of a run that chooses what to sample or keep.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show a run's iterations and devices, its tasks, or a session turn by turn, from its directory alone."""
    from sf_core.reports.outcomes.table import inspect_tasks
    from sf_core.reports.tables import inspect_run, inspect_session, inspect_timeline, run_data

    if as_json and (session is not None or timeline or tasks):
        _fail("--json prints the iterations of a run: leave --session, --timeline and --tasks out")
    if as_json:
        return print_json(run_data(run))
    if session is not None:
        view = inspect_session(run, session)
    elif tasks:
        view = inspect_tasks(run)
    else:
        view = inspect_timeline(run) if timeline else inspect_run(run)
    console.print(view)


@app.command()
def settings() -> None:
    """Print every setting with its default and description, as a configuration file."""
    from sf_core.config.yaml_file import settings_page

    print(settings_page(), end="")


@app.command()
@report_bad_input()
def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    scheduler: Annotated[
        str | None,
        typer.Option(help="By default the configuration's, else that of SF_SCHEDULER.", show_default=False),
    ] = None,
) -> None:
    """Show what would run where and why, without starting anything."""
    from sf_core.cli.explain import explain_plan
    from sf_core.stages.settling.first_tasks import check_held_out

    settings = _config(config, overrides)
    check_held_out(settings)
    console.print(explain_plan(settings, scheduler=scheduler))


def _config(files: Sequence[Path], overrides: list[str] | None) -> RunConfig:
    with report_bad_input():
        return _runnable(load_config(files, overrides), " ".join(map(str, files)))


def _read_stored(run: str, overrides: list[str] | None = None) -> RunConfig:
    from sf_core.stages.settling.stored_config import read_stored_config

    with report_bad_input():
        return _runnable(override_config(read_stored_config(run), overrides, run), run)


def _runnable(config: RunConfig, source: str) -> RunConfig:
    """The configuration, after its environment, Python references, command and model folder were checked."""
    from sf_core.environments.registry import (
        agent_of,
        check_host,
        environment_of,
        group_reward_of,
        prepare_of,
        reward_of,
        tasks_of,
    )
    from sf_core.scheduling.cluster import scheduler_of
    from sf_core.stages.settling.start_folder import check_start

    sys.path.insert(0, os.getcwd())
    try:
        for checked in (environment_of, tasks_of, reward_of, group_reward_of, prepare_of):
            checked(config.environment)
        # a program and a sandbox need not be here if the workers are elsewhere
        workers_are_here = scheduler_of(config) is None
        if workers_are_here or not isinstance(config.environment.agent, Command):
            agent_of(config.environment)
        if workers_are_here:
            check_host(config.environment)
        check_start(config)
    except (ValueError, OSError) as error:
        _fail(f"{source}: {error}")
    return config


def _launch(flow: str, config: RunConfig, output: Console = console, *, says_result: bool = True) -> None:
    from sf_core.cli.launch import LaunchError, launch

    signal.signal(signal.SIGTERM, interrupt)
    try:
        launch(flow, config, output, says_result=says_result)
    except LaunchError as error:
        say_error(str(error))
        raise typer.Exit(1) from None
    except OSError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def main() -> None:
    from sf_core.surroundings import (
        check_names,
        dataplane_url,
        prefect_api_url,
        raise_open_files,
        reach_directly,
    )

    try:
        # the path on which the processes of a command look for packages
        check_names([os.getcwd(), *sys.path])
    except ImportError as error:
        say_error(str(error))
        sys.exit(2)
    except FileNotFoundError:
        say_error("the current folder is not there any more: call the command in another one")
        sys.exit(2)
    reach_directly(prefect_api_url(), dataplane_url())
    raise_open_files()
    app()
