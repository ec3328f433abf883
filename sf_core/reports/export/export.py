"""`sf export`: the branches of a run, one after the other, in the format that is asked for.

Branches that a format cannot hold are left out. Every row says whether it renders to what the policy saw
(sf_core/dataplane/chat/rendered.py).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from sf_core.dataplane.chat.rendered import PromptChecker
from sf_core.reports.export.atif import Atif
from sf_core.reports.export.conversations import Format, Row, read_conversations
from sf_core.reports.export.sharegpt import ShareGpt
from sf_core.reports.export.trl import Trl
from sf_core.reports.export.verl import Verl
from sf_core.reports.view import RunView
from storage import files
from storage.run_directory import RunDirectory

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
