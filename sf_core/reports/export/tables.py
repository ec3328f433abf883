"""`sf export --to parquet`: the tables of branches and of judgements, copied to files of the newest schema
version.

A run that an earlier version began has files of two schema versions. Other readers take them for two tables.
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from sf_core.reports.view import RunView
from storage import files
from storage.run_directory import RunDirectory
from storage.tables import judgements, parquet
from storage.tables.batches import read_batch

BRANCHES = ("trajectories", "evaluations", "opened", "batches")

JUDGEMENTS = {
    "judgements": "judgements",
    "judgements/evaluations": "evaluation_judgements",
    "evaluation_judgements": "evaluation_judgements",
}
"""Tables of judgements, by the folders that runs have; earlier runs have one within another."""


def export_tables(run_uri: str, out: str) -> int:
    """Write the tables into a folder, as they are in a run directory; returns the number of rows. Raises
    ValueError with one sentence if there is no run, the folder is not empty, or a file cannot be read."""
    run = RunView.open(run_uri).run
    copy = RunDirectory(out)
    if files.list_folders(out) or files.list_files(out):
        raise ValueError(f"{out} is not empty; choose another folder or remove it")
    num_rows = sum(_copy(run, kind, copy, kind, _read_branches) for kind in BRANCHES)
    return num_rows + sum(
        _copy(run, kind, copy, table, judgements.read_file) for kind, table in JUDGEMENTS.items()
    )


def _copy(
    run: RunDirectory, kind: str, copy: RunDirectory, table: str, read: Callable[[str], pa.Table]
) -> int:
    num_rows = 0
    for number, uris in run.list_partitions(kind).items():
        for uri in uris:
            rows = read(uri)
            parquet.write_table(f"{copy.partition(table, number)}/{uri.rpartition('/')[2]}", rows)
            num_rows += len(rows)
    return num_rows


def _read_branches(uri: str) -> pa.Table:
    return read_batch(uri).drop_columns(["iteration"])
