"""Prints a sweep: its table, what is missing, and the place of its picture."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sf_core.reports.tables import make_printable, make_table
from sf_core.sweeps.results import describe_states, read_results
from sf_core.sweeps.sweep import OpenSweep
from sf_core.sweeps.table import HEADINGS, LEGEND, draw, list_faults, setting_row
from storage.files import write_atomic


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
