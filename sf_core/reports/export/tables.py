"""`sf export --to parquet`: the tables of branches, copied to files of the newest schema version.

A run that an earlier version began has files of two schema versions. Other readers take them for two tables.
"""

from __future__ import annotations

from sf_core.reports.view import open_run
from storage import files
from storage.run_directory import RunDirectory
from storage.tables import parquet
from storage.tables.batches import read_batch

TABLES = ("trajectories", "evaluations", "opened", "batches")


def export_tables(run_uri: str, out: str) -> int:
    """Write the tables into a folder, as they are in a run directory; returns the number of rows. Raises
    ValueError with one sentence if there is no run, the folder is not empty, or a file cannot be read."""
    run, copy = open_run(run_uri).run, RunDirectory(out)
    if files.list_folders(out) or files.list_files(out):
        raise ValueError(f"{out} is not empty; choose another folder or remove it")
    num_rows = 0
    for kind in TABLES:
        for number, uris in run.list_partitions(kind).items():
            for uri in uris:
                rows = read_batch(uri).drop_columns(["iteration"])
                parquet.write_table(f"{copy.partition(kind, number)}/{uri.rpartition('/')[2]}", rows)
                num_rows += len(rows)
    return num_rows
