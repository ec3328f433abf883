"""The command `sf sweep`: begins, continues and shows sweeps."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sf_core.cli.arguments.completion import complete_config, complete_override, complete_sweep
from sf_core.cli.arguments.groups import App
from sf_core.cli.terminal import (
    console,
    errors,
    fail,
    interrupt,
    print_json,
    report_bad_input,
    say_error,
    tell,
)
from sf_core.config import StorageConfig

if TYPE_CHECKING:
    from sf_core.stages.sweeps.sweep import OpenSweep, SweepFolder

commands = App()

SEEDS = 3
"""Number of seeds if none is given."""

MOST = 1000
"""Most seeds, and most runs at a time."""


@commands.command()
@report_bad_input()
def sweep(
    config: Annotated[
        list[Path] | None,
        typer.Argument(
            help="YAML file, or the name of a built-in configuration. A configuration overrides the "
            "configurations before it.",
            autocompletion=complete_config,
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Vary a setting: train.learning_rate=1e-3,3e-3. All combinations are run. One value changes "
            "the setting in all runs. A value with a comma is written in quotes, brackets or braces.",
            autocompletion=complete_override,
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST,
            help="Number of seeds per setting, from the seed of the configuration. Default: 3.",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="Name of the sweep. By default a name of the configuration and the settings."),
    ] = None,
    at_once: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST, help="Maximum number of runs at a time. By default as many as the workers fit."
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(help="Continue the sweep with this name.", autocompletion=complete_sweep),
    ] = None,
    show: Annotated[
        str | None,
        typer.Option(
            help="Print the table of the sweep with this name, and write the picture of the sweep.",
            autocompletion=complete_sweep,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --show: print one JSON document instead of a table.")
    ] = False,
) -> None:
    """Train one run for each setting and seed, and compare the settings.

    The same command again continues a sweep that was stopped: finished runs are not repeated.
    More seeds, or more values of the same settings, add runs to the sweep.

        sf sweep quickstart --seeds 3 --set train.learning_rate=1e-3,3e-3
    """
    _check_choice(config, resume, show)
    if as_json and show is None:
        fail("--json is an option of --show: add --show NAME, or leave --json out")
    if show is not None:
        return _show(_find(show), as_json)
    if resume is not None:
        for option, value in {"--set": overrides, "--seeds": seeds, "--name": name}.items():
            if value:
                fail(
                    f"--resume {resume} continues the sweep as it is stored: leave {option} out, or repeat "
                    "the command that began the sweep"
                )
        return _run(_read(_find(resume)), at_once)
    _run(_begin(config or [], overrides or [], seeds or SEEDS, name), at_once)


def _check_choice(config: list[Path] | None, resume: str | None, show: str | None) -> None:
    options = {"CONFIG": config, "--resume NAME": resume, "--show NAME": show}
    named = [option for option, value in options.items() if value]
    if len(named) != 1:
        which = f"not {' and '.join(named)}" if named else "to begin, continue or show a sweep"
        fail(f"sf sweep needs one of CONFIG, --resume NAME and --show NAME, {which}")


def _begin(files: list[Path], overrides: list[str], seeds: int, name: str | None) -> OpenSweep:
    from sf_core.cli.sweeps.launch import check_config
    from sf_core.reports.tables import make_printable
    from sf_core.stages.sweeps.expansion import expand
    from sf_core.stages.sweeps.sweep import OpenSweep, SweepFolder
    from storage.files import absolute, check_writable

    settings_of_sweep = expand(files, overrides, seeds, name, check_config)
    for setting in settings_of_sweep.settings:
        if setting.fault is not None:
            sentence = f"{setting.label} has no runs: {setting.fault}"
            errors.print(make_printable(sentence), soft_wrap=True)
    folder = SweepFolder(absolute(settings_of_sweep.root), settings_of_sweep.name)
    check_writable(folder.root)
    return OpenSweep(folder, folder.put(settings_of_sweep))


def _run(opened: OpenSweep, at_once: int | None) -> None:
    from sf_core.cli.sweeps.launch import SweepError, launch_sweep

    signal.signal(signal.SIGTERM, interrupt)
    try:
        launch_sweep(opened, at_once, console)
    except SweepError as error:
        say_error(str(error))
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _show(folder: SweepFolder, as_json: bool) -> None:
    from sf_core.cli.sweeps.launch import print_sweep
    from sf_core.stages.sweeps.results import read_results, to_data

    opened = _read(folder)
    if as_json:
        return print_json(to_data(opened, read_results(opened)))
    for line in print_sweep(opened, console):
        tell(line)


def _read(folder: SweepFolder) -> OpenSweep:
    from sf_core.stages.sweeps.sweep import OpenSweep

    return OpenSweep.read(folder)


def _find(sweep: str) -> SweepFolder:
    """A sweep that is given by its folder, or by its name in the default of `storage.root`."""
    from sf_core.stages.sweeps.sweep import FOLDER, SweepFolder
    from storage.files import absolute

    if "/" not in sweep and not os.path.exists(os.path.join(sweep, "sweep.json")):
        return SweepFolder(absolute(StorageConfig().root), sweep)
    above, _, name = absolute(sweep).rstrip("/").rpartition("/")
    root, _, between = above.rpartition("/")
    if between != FOLDER:
        raise ValueError(
            f"{sweep}: no sweep here; sweeps are in the folder {FOLDER} beside their runs, for example "
            f"runs/{FOLDER}/NAME"
        )
    return SweepFolder(root, name)
