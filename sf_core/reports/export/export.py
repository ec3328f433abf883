"""`sf export`: the branches of a run, one after the other, in the format that is asked for.

Branches that a format cannot hold are left out. Every row says whether it renders to what the policy saw
(sf_core/dataplane/chat/rendered.py).

`--to parquet` copies the tables of branches and of judgements to files of the newest schema version. A run
that an earlier version began has files of two schema versions, which other readers take for two tables.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from sf_core.dataplane.chat.rendered import PromptChecker
from sf_core.reports.export.atif import Atif
from sf_core.reports.export.conversations import Format, Row, ShareGpt, Trl, read_conversations
from sf_core.reports.export.verl import Verl
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


FORMATS: dict[str, type[Format]] = {"trl": Trl, "verl": Verl, "sharegpt": ShareGpt, "atif": Atif}


@dataclass(frozen=True, slots=True)
class Exported:
    rows: int
    left_out: Counter[str]
    """Numbers of branches left out, by the reason."""
    unlike: int = 0
    """Number of rows that render to something else than the policy saw."""
    unchecked: str | None = None
    """Why rendering was not checked; None if it was."""


def export(run_uri: str, format_name: str, out: str, *, opened: bool = False) -> Exported:
    """Export the trajectories of iterations, or the sessions that agents opened. Raises ValueError with one
    sentence: no run, nothing to export, unknown format, wrong or taken name."""
    make = FORMATS.get(format_name)
    if make is None:
        raise ValueError(f"unknown format {format_name}; use one of {', '.join(FORMATS)}, parquet")
    if not out.endswith(make.ending):
        raise ValueError(f"{out}: the name of a file for {format_name} must end in {make.ending}")
    run = RunDirectory(run_uri)
    # a folder of `sf serve --record` has opened sessions, and no run
    view = RunView(run) if opened and run.list_partitions("opened") else RunView.open(run_uri)
    if files.exists(out):
        raise ValueError(f"{out} already exists; choose another name or remove it")
    parts = view.parts("opened at version" if opened else "trains iteration")
    if not parts:
        missing = "opened sessions have finished" if opened else "trajectories are committed"
        raise ValueError(f"{run.run_id}: no {missing} yet")
    num_rows = 0
    left_out = Counter[str]()
    unlike = 0
    media = run.media_dir
    kind = make(parts)
    reader, unchecked = _open_reader(run)

    def rows() -> Iterator[list[Row]]:
        nonlocal num_rows, unlike
        read = (read_conversations(uri, media) for uri in parts)
        for conversations in itertools.chain.from_iterable(read):
            exported = []
            for conversation in conversations:
                if reader is not None:
                    as_seen = reader.matches_prompt(
                        *kind.render(conversation), conversation.prompt_ids.tolist()
                    )
                    conversation.facts["as_seen"] = as_seen
                row = kind.convert(conversation)
                if isinstance(row, str):
                    left_out[row] += 1
                else:
                    unlike += conversation.facts["as_seen"] is False
                    exported.append(row)
            num_rows += len(exported)
            yield exported

    kind.write(out, rows())
    return Exported(num_rows, left_out, unlike, unchecked)


def _open_reader(run: RunDirectory) -> tuple[PromptChecker | None, str | None]:
    try:
        return PromptChecker(run), None
    except ValueError as error:
        return None, str(error)
