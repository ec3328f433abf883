"""The commands that work on run directories: `sf ls`, `inspect`, `gc`, `report`, `export` and `replay`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from sf_core.cli.arguments.completion import complete_run
from sf_core.cli.arguments.groups import App
from sf_core.cli.terminal import console, errors, fail, print_json, report_bad_input, tell
from sf_core.config import StorageConfig

if TYPE_CHECKING:
    from sf_core.stages.retention import Removable

commands = App()


def find_run(run: str) -> str:
    """Directory of a run that is given by its directory, or by its name in the default of `storage.root`."""
    is_name = "/" not in run and not os.path.exists(run)
    return os.path.join(StorageConfig().root, run) if is_name else run


RunDir = Annotated[
    str,
    typer.Argument(
        help="Run directory, its URL, or the name of a run in ./runs.",
        callback=find_run,
        autocompletion=complete_run,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")]


@commands.command("ls")
@report_bad_input()
def list_runs(
    root: Annotated[
        str, typer.Argument(help="Folder, or URL of a folder, that contains run directories.")
    ] = "runs",
    as_json: AsJson = False,
) -> None:
    """List runs with their state, number of iterations, newest rewards and size on disk."""
    from sf_core.reports.states import find_runs, run_state

    table = Table("run", "state", "iterations", "reward", "held out", "size", box=None)
    states = [run_state(run) for run in find_runs(root)]
    for state in states:
        progress = state.progress
        table.add_row(
            state.name,
            state.state,
            f"{progress.published}/{'?' if state.iterations is None else state.iterations}",
            _reward(progress.reward),
            _reward(progress.held_out),
            _megabytes(state.bytes),
        )
    faults = [state.fault for state in states if state.fault is not None]
    if faults and len(states) == 1:
        fail(faults[0])
    if as_json:
        return print_json([dataclasses.asdict(state) for state in states])
    console.print(table)
    for fault in faults:
        errors.print(f"cannot be read: {fault}", soft_wrap=True)


@commands.command()
@report_bad_input()
def inspect(
    run: RunDir,
    session: Annotated[
        str | None, typer.Option(help="Show the session with this id, turn by turn. `sf report` shows ids.")
    ] = None,
    timeline: Annotated[
        bool,
        typer.Option(
            "--timeline",
            help="Show the work of each device over time, and write timeline.json and timeline.png.",
        ),
    ] = False,
    tasks: Annotated[
        bool,
        typer.Option("--tasks", help="Show the results of tasks, for a run with a curriculum or a gate."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the iterations and devices of a run, the tasks of the run, or one session turn by turn."""
    from sf_core.reports.outcomes.table import inspect_tasks
    from sf_core.reports.tables import inspect_run, inspect_session, inspect_timeline, run_data

    if as_json and (session is not None or timeline or tasks):
        fail("--json prints the iterations of a run: leave --session, --timeline and --tasks out")
    if as_json:
        return print_json(run_data(run))
    if session is not None:
        view = inspect_session(run, session)
    elif tasks:
        view = inspect_tasks(run)
    else:
        view = inspect_timeline(run) if timeline else inspect_run(run)
    console.print(view)


@commands.command()
@report_bad_input()
def gc(
    where: Annotated[
        str,
        typer.Argument(
            help="Run directory, folder that contains run directories, or the name of a run in ./runs.",
            callback=find_run,
            autocompletion=complete_run,
        ),
    ],
    keep_checkpoints: Annotated[int, typer.Option(min=1, help="Number of newest checkpoints to keep.")] = 1,
    keep_weights: Annotated[int, typer.Option(min=1, help="Number of newest policy versions to keep.")] = 1,
    journals: Annotated[
        bool, typer.Option("--journals", help="In addition, remove the journals of finished runs.")
    ] = False,
    yes: Annotated[
        bool,
        typer.Option(
            "--yes", help="Remove the listed items. Without this option the command only lists them."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove old checkpoints and weights. The runs can still continue afterwards."""
    from sf_core.reports.states import await_restarts, find_runs
    from sf_core.stages.retention import RetentionLimits, check_not_linked, find_removable

    keep = RetentionLimits(keep_checkpoints, keep_weights, journals=not journals)
    warn = partial(errors.print, soft_wrap=True)
    spared: list[dict[str, str | int]] = []
    runs = find_runs(where)
    if yes:
        await_restarts(runs, warn)
    for run in runs:
        try:
            check_not_linked(run, where)
            spares = find_removable(run, keep)
        except ValueError as error:
            if len(runs) == 1:
                raise
            warn(f"skipped: {error}")
            continue
        if not as_json:
            _print_spares(run.run_id, spares)
        for spare in spares:
            if yes:
                spare.remove()
            spared.append({"run": run.run_id, "kind": spare.kind, "name": spare.name, "bytes": spare.bytes})
    if as_json:
        return print_json({"removed": yes, "items": spared})
    done = "removed" if yes else "would remove"
    hint = "" if yes or not spared else "; nothing is removed without --yes"
    total = sum(int(spare["bytes"]) for spare in spared)
    console.print(f"{done} {len(spared)} items, {_megabytes(total)}{hint}")


@commands.command()
@report_bad_input()
def report(
    runs: Annotated[
        list[str],
        typer.Argument(
            help="Run directory, its URL, or the name of a run in ./runs. Several runs are compared.",
            callback=lambda runs: [*map(find_run, runs)],
            autocompletion=complete_run,
        ),
    ],
    output: Annotated[
        str | None,
        typer.Option(
            *("--output", "-o"),
            help="File to write. By default RUN/report.html for one run, comparison.html for several runs.",
        ),
    ] = None,
    max_mb: Annotated[
        float, typer.Option(help="Maximum size of the page, in MB. Sessions that do not fit are left out.")
    ] = 16.0,
) -> None:
    """Write one HTML page about a run: curves, devices, groups, the tokens of every session.

    The page needs no network. If you name several runs, the page compares the curves, the results and the
    settings of these runs.
    """
    from sf_core.reports.html.comparison import write_comparison_page
    from sf_core.reports.html.page import write_report
    from storage.files import follow
    from storage.local import stream_number

    _check_folder(output)
    if output is not None:
        output = follow(output)
    single_run = runs[0] if len(runs) == 1 else None
    written = write_report(single_run, output, max_mb) if single_run else write_comparison_page(runs, output)
    if stream_number(written) is None:
        tell(written)


@commands.command()
@report_bad_input()
def export(
    run: RunDir,
    out: Annotated[str, typer.Argument(help="File to write. With --to atif or parquet: folder to write.")],
    to: Annotated[str, typer.Option(help="Format of the output: trl, verl, sharegpt, atif or parquet.")],
    opened: Annotated[
        bool,
        typer.Option(
            "--opened",
            help="Export the sessions that clients opened, instead of the sessions of the run's tasks.",
        ),
    ] = False,
) -> None:
    """Write the trajectories of a run to a file, in the format of another training tool.

    The format parquet is our own: it copies the tables of a run that an earlier version began.
    """
    from sf_core.reports.export.export import export, export_tables
    from storage.tables.parquet import SCHEMA_VERSION

    _check_folder(out)
    if to == "parquet":
        return tell(f"{out}: {export_tables(run, out)} rows of schema version {SCHEMA_VERSION}")
    exported = export(run, to, out, opened=opened)
    lines = [
        f"{out}: {exported.rows} conversations for {to}; {exported.left_out.total()} left out "
        "(branches that the format cannot hold)",
        *(f"{count} left out: {why}" for why, count in exported.left_out.most_common()),
    ]
    if exported.unchecked is not None:
        lines.append(f"not compared with the tokens that the policy saw: {exported.unchecked}")
    elif exported.unlike:
        lines.append(
            f"{exported.unlike} conversations render to other tokens than the policy saw: "
            "their as_seen is false"
        )
    tell("\n".join(lines))


@commands.command()
@report_bad_input()
def replay(
    run: RunDir,
    iteration: Annotated[int, typer.Option(min=0, help="Number of the iteration to train again.")],
) -> None:
    """Train the stored batch of an iteration again, and compare the new weights with the stored weights."""
    from sf_core.cli.replay import replay

    result = replay(run, iteration)
    if result.equal:
        console.print(f"iteration {iteration}: the weights are equal, bit for bit")
        return
    difference = result.largest_difference
    by = "the stored weights were removed" if difference is None else f"by at most {difference:.3g}"
    console.print(f"iteration {iteration}: the weights differ, {by}")
    for name, (now, then) in result.metrics.items():
        console.print(f"  {name}: {now:.6g}, was {then:.6g}")
    raise typer.Exit(1)


def _print_spares(run_id: str, spares: Sequence[Removable]) -> None:
    """A line for each kind of things that can be removed."""
    for kind, group in groupby(spares, key=lambda spare: spare.kind):
        of_kind = [*group]
        description = "unfinished uploads of " if kind == "upload" else ""
        first = of_kind[0].name
        last = of_kind[-1].name.rpartition("/")[2]
        names = first if len(of_kind) == 1 else f"{first} to {last} ({len(of_kind)} items)"
        console.print(f"{run_id}  {description}{names}  {_megabytes(sum(spare.bytes for spare in of_kind))}")


def _check_folder(file: str | None) -> None:
    """End the command if a file is to be written into a local folder that does not exist."""
    folder = os.path.dirname(file or "")
    if folder and "://" not in folder and not os.path.isdir(folder):
        fail(f"{folder} does not exist: create this folder first, or name another file than {file}")


def _reward(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
