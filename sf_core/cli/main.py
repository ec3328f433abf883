"""The command `sf`: parses arguments, calls the code that does the work, and prints results and errors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from sf_core.cli import terminal
from sf_core.cli.arguments.addresses import port_of
from sf_core.cli.arguments.completion import complete_config, complete_override, complete_setting
from sf_core.cli.arguments.groups import App, Commands
from sf_core.cli.arguments.proxies import STARTING, check_proxies
from sf_core.cli.hosts import commands as host_commands
from sf_core.cli.model import commands as model_commands
from sf_core.cli.push import commands as push_commands
from sf_core.cli.runs import AsJson, RunDir
from sf_core.cli.runs import commands as data_commands
from sf_core.cli.serving.command import commands as serve_commands
from sf_core.cli.sweeps.command import commands as sweep_commands
from sf_core.cli.terminal import (
    console,
    errors,
    interrupt,
    nothing_else_printed,
    print_json,
    report_bad_input,
    say_error,
)
from sf_core.cli.terminal import fail as _fail
from sf_core.config import RunConfig
from sf_core.config.yaml_file import builtin_configs, load_config, override_config
from sf_core.process.environment_variables import STACK_FOLDER

app = App(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(serve_commands)
app.add_typer(host_commands)
app.add_typer(data_commands)
app.add_typer(model_commands)
app.add_typer(push_commands)
app.add_typer(sweep_commands)

NAMES = f"the name of a built-in configuration: {', '.join(builtin_configs())}"
ConfigFile = Annotated[
    list[Path],
    typer.Argument(
        help=f"YAML file, or {NAMES}. A configuration overrides the configurations before it.",
        autocompletion=complete_config,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Override a setting, for example train.iterations=3. Repeat the option for more settings.",
        autocompletion=complete_override,
    ),
]
SkipTry = Annotated[bool, typer.Option("--skip-try", help="Try no task before a new run starts.")]
StackFolder = Annotated[Path, typer.Option(help="Folder for the stack's configuration, logs and journals.")]


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"seamlessflow {version('seamlessflow')}")
        raise typer.Exit


@app.callback()
def sf(
    asked: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Train LLM agents with reinforcement learning, as a workflow on Prefect and Dask.

    `sf COMMAND --help` explains one command.
    `sf --install-completion` makes your shell complete the names of commands, settings and runs.
    """


@app.command("init")
@report_bad_input()
def init_project(
    name: Annotated[
        str, typer.Argument(help="Folder to create. The Python module in the folder gets the same name.")
    ],
) -> None:
    """Create a small project: tasks, an agent, a reward function, a test and a configuration."""
    from sf_core.cli.project.create import create_project

    try:
        files = create_project(name)
    except OSError as error:
        _fail(f"{name} cannot be written: {error.strerror}")
    for file in files:
        print(file)
    print(f"cd {files[0].parent} && sf try train.yaml && sf train train.yaml")


@app.command()
def train(config: ConfigFile, overrides: Overrides = None, skip_try: SkipTry = False) -> None:
    """Train the policy of an agent. If a run with this run_id exists, the command continues this run."""
    _launch("train", _config(config, overrides), rehearses=not skip_try)


@app.command()
def resume(run: RunDir, skip_try: SkipTry = False) -> None:
    """Continue a stopped run with the stored settings of the run."""
    _launch("train", _read_stored(run), rehearses=not skip_try)


@app.command("try")
@report_bad_input()
def try_agent(
    config: ConfigFile,
    overrides: Overrides = None,
    index: Annotated[int, typer.Option(min=0, help="Index of the task within the split.")] = 0,
    split: Annotated[
        Literal["train", "holdout"], typer.Option(help="Split from which the task is taken.")
    ] = "train",
    endpoint: Annotated[
        str | None,
        typer.Option(
            help="Base URL of an OpenAI-compatible server that answers the agent. OPENAI_API_KEY contains "
            "the server's key. By default the command serves the policy of the configuration."
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="Name of the model on the server at --endpoint.")] = "policy",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the task, requests, answer and reward as one JSON document.")
    ] = False,
) -> None:
    """Run the agent on one task, without training. Prints the conversation, answer and reward."""
    from sf_core.cli.serving.trial import run_trial

    with nothing_else_printed(as_json):
        settings = _config(config, overrides)
    run_trial(settings, overrides or (), split, index, endpoint, model, as_json=as_json)


@app.command()
def evaluate(
    run: RunDir,
    overrides: Overrides = None,
    version: Annotated[
        int | None, typer.Option(min=0, help="Policy version to measure. By default the newest version.")
    ] = None,
    against: Annotated[
        int | None, typer.Option(min=0, help="Policy version to compare with, on equal tasks and seeds.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL file whose prompts replace the held-out tasks.")
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the result as one JSON document."),
    ] = False,
) -> None:
    """Measure a policy version of a run on the held-out tasks of the run, without training.

    Results with --version, --against, --prompts or --json are stored in RUN/measured.
    Results with --set are stored in the same folder, unless --set changes only
    evaluate.num_tasks, or settings in the sections cluster and dataplane.
    All other results are stored as evaluations of the run itself.
    """
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
            help="YAML file or built-in configuration whose cluster.workers are started. By default the "
            "workers that `sf settings cluster.workers` prints are started.",
            autocompletion=complete_config,
        ),
    ] = None,
    folder: StackFolder = STACK_FOLDER,
    prefect_port: Annotated[int, port_of("the Prefect server")] = 4200,
    scheduler_port: Annotated[int, port_of("the Dask scheduler")] = 8786,
    dataplane_port: Annotated[int, port_of("the data plane")] = 8700,
) -> None:
    """Start Prefect, Dask, a data plane and the deployments on this machine, until `sf down` stops them."""
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
        "to train on this stack, set these variables:\n"
        + "\n".join(f"export {name}={address}" for name, address in services.addresses.items()),
        soft_wrap=True,
    )


@app.command()
def down(folder: StackFolder = STACK_FOLDER) -> None:
    """Stop the stack that `sf up` started."""
    from sf_core.cli.stack.standing import down as bring_down

    was_up = bring_down(folder.resolve(), console.print)
    console.print("the stack is down" if was_up else f"no stack runs in {folder}")


@app.command("setup-server")
def setup_server(
    pool: Annotated[str, typer.Option(help="Name of the Prefect work pool of this cluster.")] = "sf",
    retries: Annotated[int, typer.Option(min=0, help="Maximum number of restarts per crashed run.")] = 2,
    silence_s: Annotated[
        float, typer.Option(min=10, help="Seconds without a heartbeat until a run counts as crashed.")
    ] = 540,
) -> None:
    """Create or update the work pool and the automations on the Prefect server at PREFECT_API_URL."""
    from sf_core.cli.arguments.services import require_prefect
    from sf_core.process.import_path import module_environment, python_module

    with report_bad_input():
        require_prefect()
    command = python_module("tasks.server", pool, str(retries), str(silence_s))
    done = subprocess.run(
        command, env=module_environment(), stderr=subprocess.PIPE, encoding="utf-8", errors="replace"
    )
    if done.returncode:
        _fail(done.stderr.strip())


@app.command()
@report_bad_input()
def settings(
    section: Annotated[
        str,
        typer.Argument(
            help="Setting or section to print, for example train.loss. By default all settings are printed.",
            autocompletion=complete_setting,
        ),
    ] = "",
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of a configuration file, for editors.")
    ] = False,
) -> None:
    """Print settings with their defaults and descriptions, as a configuration file.

    With the JSON Schema of the settings, an editor can check and complete a configuration file.
    Write the schema to a file once: `sf settings --schema > settings.schema.json`.
    Then put this line at the beginning of the configuration file:

        # yaml-language-server: $schema=settings.schema.json
    """
    from sf_core.config.reference.page import settings_page, settings_schema

    if schema and section:
        _fail(f"--schema describes all settings: leave {section} out")
    if schema:
        return print_json(settings_schema())
    print(settings_page(section), end="")


@app.command()
@report_bad_input()
def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    scheduler: Annotated[
        str | None,
        typer.Option(help="Dask scheduler of the workers. By default cluster.scheduler, or SF_SCHEDULER."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the planned work of each worker, and the memory and disk that the run needs. Starts nothing."""
    from sf_core.cli.arguments.services import check_scheduler
    from sf_core.cli.explain import explain_plan

    settings = _config(config, overrides)
    check_scheduler(settings, scheduler)
    explanation = explain_plan(settings, scheduler=scheduler)
    print_json(explanation.as_data()) if as_json else console.print(explanation.as_table())


def _config(files: Sequence[Path], overrides: list[str] | None) -> RunConfig:
    with report_bad_input():
        return _runnable(load_config(files, overrides), " ".join(map(str, files)))


def _read_stored(run: str, overrides: list[str] | None = None) -> RunConfig:
    from sf_core.stages.preflight.stored_config import read_stored_config

    with report_bad_input():
        return _runnable(override_config(read_stored_config(run), overrides, run), run)


def _runnable(config: RunConfig, source: str) -> RunConfig:
    """The configuration, after its environment, Python references, command and model folder were checked."""
    from sf_core.process.import_path import import_from
    from sf_core.stages.preflight.checks import preflight
    from sf_core.stages.preflight.facts import Facts

    import_from([os.getcwd()])
    try:
        preflight(Facts(config))
    except (ValueError, OSError) as error:
        _fail(f"{source}: {error}")
    return config


def _launch(flow: str, config: RunConfig, output: Console = console, **options: bool) -> None:
    from sf_core.cli.launch import LaunchError, launch

    signal.signal(signal.SIGTERM, interrupt)
    try:
        launch(flow, config, output, **options)
    except LaunchError as error:
        say_error(str(error))
        raise typer.Exit(1) from None
    except OSError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@terminal.command_streams()
def main() -> None:
    from sf_core.process.environment_variables import dataplane_url, prefect_api_url, reach_directly
    from sf_core.process.import_path import ROOT, import_from, is_another_copy
    from sf_core.process.limits import raise_open_files

    if os.environ.get("_SF_COMPLETE", "").startswith("complete"):
        # a shell shows nothing but the words that fit
        with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stderr(nowhere):
            app(prog_name="sf")
    # commands that need the user's modules add the user's folders
    import_from([])
    try:
        folder = Path.cwd()
    except FileNotFoundError:
        say_error("the current folder does not exist any more: run the command in another folder")
        sys.exit(2)
    if STARTING.intersection(sys.argv[1:2]) and not {"--help", "-h"}.intersection(sys.argv):
        if is_another_copy(folder):
            errors.print(f"note: this folder has a copy of SeamlessFlow, but {ROOT} runs", soft_wrap=True)
        try:
            check_proxies()
        except ValueError as error:
            say_error(str(error))
            sys.exit(2)
    reach_directly(prefect_api_url(), dataplane_url())
    raise_open_files()
    app(prog_name="sf")
