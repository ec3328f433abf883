"""A run directory in the terminal: its iterations as a table, one session turn by turn. Behind `sf inspect`.

Owns the layout, whose marks survive a pipe. The figures are from sf_core/reports/view.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sf_core.process.user_code import show
from sf_core.reports.evaluations.comparison import GREEDY, GivenAnswer
from sf_core.reports.evaluations.judgements import describe_judgement, judgements_of, sum_judges
from sf_core.reports.iterations import kinds_text
from sf_core.reports.sessions import Decode, open_decoder
from sf_core.reports.timeline import record_devices, write_timelines
from sf_core.reports.view import DeviceRow, RunView
from sf_core.reports.warnings import run_failures, run_warnings
from storage.json_files import load_json
from storage.media import media_file
from storage.run_directory import STAGES, RunDirectory
from storage.tables.judgements import Judgement
from storage.tables.schema import NOT_SAMPLED, Trajectory, TurnSpan

MOST_CHARACTERS = 400
"""Length to which a task or an answer is cut where it stands beside others."""

COLUMN_WIDTH = 60
"""Most characters in a line of a cell, or a file of the output would have lines as long as the texts."""

HEADINGS = (
    "iter-\nation",
    "reward",
    "held-\nout",
    "lag\nmean",
    "lag\nmax",
    "tokens\nsampled",
    "tokens\ntrained",
    "sessions",
    "failed",
)

DEVICE_COLUMNS = {
    "utilisation_cluster": "busy all",
    "utilisation_train": "busy train",
    "utilisation_rollout": "busy rollout",
    "switches": "switches",
    "to_train_mean_s": "to train s",
    "to_rollout_mean_s": "to rollout s",
    "tokens_rollout_only": "tokens own",
    "tokens_lent": "tokens lent",
}
"""Figures of devices in the order of a table, with their column titles."""

LEAST_LOADING = 0.005
"""Smallest share of the time spent loading that is shown beside a device's idle share."""

MAX_DEVICES = 8
"""Number of devices with a column in a table; the idle time of more is in the metrics."""

TRAINED = "bold green underline"
CARRIED = "green underline"


def inspect_run(uri: str) -> RenderableType:
    """A table of iterations. Raises ValueError with one sentence if there is no run or a file is broken."""
    view = RunView.open(uri)
    kinds_of = {iteration.number: kinds_text(iteration.kinds) for iteration in view.iterations}
    chooses = any(kinds_of.values())
    table = make_table(f"run {view.run.run_id}")
    if chooses:
        table.padding = (0, 1, 0, 0)
    for name in (*HEADINGS, *(["right/mixed\n/wrong"] if chooses else [])):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("stages", no_wrap=True)
    if 0 in view.held_out:
        table.add_row("start", "", f"{view.held_out[0]:.3f}")
    for iteration in view.iterations:
        kinds = [kinds_of[iteration.number]] if chooses else []
        stages = " ".join(stage[0].upper() if stage in iteration.stages else "." for stage in STAGES)
        table.add_row(*_iteration_cells(view, iteration.number), *kinds, stages)
    footer = [*run_failures(view), *sum_judges(view.iterations)]
    if adapter := view.describe_adapter():
        footer.append(adapter)
    footer += [
        *run_warnings(view),
        "tokens sampled: by all engines in that time; trained: of the batch's sessions",
        f"held-out: reward after the iteration; stages committed: {', '.join(STAGES)}",
    ]
    if chooses:
        footer.append(f"their tasks: sf inspect {uri} --tasks")
    if view.iterations and (last := view.rollouts.get(view.iterations[-1].number)) is not None:
        footer.append(f"one session: sf inspect {uri} --session {last.example}")
    return Group(table, _devices_table(view), Text("\n" + "\n".join(footer), style="dim"))


def run_data(uri: str) -> dict[str, Any]:
    """The figures of `inspect_run` for programs. Raises ValueError like it."""
    view = RunView.open(uri)
    rows = []
    for iteration in view.iterations:
        row: dict[str, Any] = {"iteration": iteration.number, "stages": list(iteration.stages)}
        if iteration.number in view.rollouts:
            row |= asdict(view.rollouts[iteration.number])
        # tokens_sampled counts the tokens of the batch only
        row["tokens_of_engines"] = view.count_sampled(iteration.number)
        row["groups"] = iteration.kinds
        rows.append(row)
    # JSON has no numbers as keys
    measured = [{"version": version, "reward": reward} for version, reward in view.held_out.items()]
    return {"run": view.run.run_id, "iterations": rows, "held_out": measured}


def inspect_timeline(uri: str) -> RenderableType:
    """A table of what the devices did in each iteration, after timeline.json and timeline.png have been
    written. Raises ValueError with one sentence if there is no run."""
    view = RunView.open(uri)
    run = view.run
    record_devices(view, len(view.iterations) - 1)
    write_timelines(view)
    drawn = f"\ntimeline: {run.trace_file} (open it in ui.perfetto.dev)\npicture: {run.timeline_picture}"
    return Group(_devices_table(view), Text(drawn, style="dim"))


def inspect_session(uri: str, session_id: str) -> RenderableType:
    """The branches of a session, turn by turn, sampled tokens marked. Raises ValueError with one sentence if
    there is no such run or session."""
    view = RunView.open(uri)
    session_set, branches = view.find_session(session_id)
    has_images = any(branch.images for branch in branches)
    first = branches[0]
    decode = open_decoder(view.run, has_images)
    task, environment, group = map(
        make_printable, (first.task_id, first.environment, first.group_id or "none")
    )
    seconds = max(0.0, first.finished_at - first.started_at)
    head = Text.assemble(
        (f"session {session_id}, {session_set.label}\n", "bold"),
        f"task {task}  environment {environment}  group {group}\n",
        f"{first.status}  reward {_reward_text(first)}  {seconds:.2f} s\n",
        (f"«{session_set.marks[0]}»", TRAINED),
        "  ",
        (f"«{session_set.marks[1]}»", CARRIED),
    )
    parts = [_branch_table(branch, decode, session_set.fate) for branch in branches]
    if has_images:
        parts.append(_images_table(view.run, branches))
    if first.output is not None:
        parts.append(_output_text(first.output))
    if judgements := judgements_of(view, session_set, session_id):
        parts.append(_judgements_text(judgements))
    return Group(head, *parts)


def answers_table(pairs: Sequence[tuple[GivenAnswer | None, GivenAnswer]], before: str, after: str) -> Table:
    """Answers to the same tasks side by side; `before` is empty if there is only one. A greedy answer is
    shown if it differs."""
    table = Table(box=box.SIMPLE, show_lines=True)
    greedy = f"{after}, {GREEDY}" if any(new.greedy for _, new in pairs) else ""
    for name in filter(None, ("task", before, after, greedy)):
        table.add_column(name, overflow="fold", max_width=COLUMN_WIDTH)
    for old, new in pairs:
        answers = [answer for answer in (old, new, new.greedy) if answer]
        shown = [
            cut_short(new.prompt),
            *(f"{answer.reward_text}  {cut_short(answer.text)}" for answer in answers),
        ]
        table.add_row(*(Text(make_printable(text)) for text in shown))
    return table


def cut_short(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else text[:MOST_CHARACTERS] + " ..."


def make_table(title: str = "") -> Table:
    shown = Text(title) if title else None
    return Table(title=shown, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))


def device_cells(figures: Mapping[int, DeviceRow]) -> tuple[list[str], list[list[str]]]:
    """The figures of devices in some iterations as text: column titles, and the cells of each row."""
    devices = sorted({name for row in figures.values() for name in row if name.startswith("idle_")})
    names = {name: f"idle {name.removeprefix('idle_')}" for name in devices[:MAX_DEVICES]} | DEVICE_COLUMNS
    rows = [
        [str(iteration), *(_device_cell(name, row) for name in names), _lag_cell(row)]
        for iteration, row in sorted(figures.items())
    ]
    return ["#", *names.values(), "tokens by lag"], rows


def _device_cell(name: str, row: DeviceRow) -> str:
    value = row.get(name)
    if value is None or math.isnan(value):
        return ""
    if name.startswith("idle_"):
        loading = row.get(f"loading_{name.removeprefix('idle_')}", 0.0)
        return f"{value:.0%}" + (f" ({loading:.0%} loading)" if loading >= LEAST_LOADING else "")
    if name.startswith("utilisation_"):
        return f"{value:.0%}"
    return f"{value:.2f}" if name.endswith("_s") else f"{value:,.0f}"


def _lag_cell(row: DeviceRow) -> str:
    return " ".join(f"{number:,.0f}" for name, number in row.items() if name.startswith("lag_"))


def _devices_table(view: RunView) -> RenderableType:
    """Table of the device figures recorded so far."""
    if not view.devices:
        return Text()
    names, rows = device_cells(view.devices)
    table = make_table("\nwhat the devices did")
    table.padding = (0, 1, 0, 0)
    for name in names:
        table.add_column(name.replace(" ", "\n"), justify="right", no_wrap=name != names[-1])
    for row in rows:
        table.add_row(*row)
    return table


def _iteration_cells(view: RunView, number: int) -> list[str]:
    """The cells of an iteration, in the order of the headings."""
    sampled = view.count_sampled(number)
    figures = view.rollouts.get(number)
    # an iteration makes the next version
    held_out = f"{view.held_out[number + 1]:.3f}" if number + 1 in view.held_out else ""
    of_engines = "" if sampled is None else shorten_number(sampled)
    if figures is None:
        return [str(number), "", held_out, "", "", of_engines, "", "", ""]
    return [
        str(number),
        f"{figures.reward_mean:.3f}",
        held_out,
        f"{figures.lag_mean:.2f}",
        str(figures.lag_max),
        of_engines,
        shorten_number(figures.tokens_sampled),
        str(figures.sessions),
        str(sum(figures.failures.values())),
    ]


def shorten_number(value: float) -> str:
    """A number in at most seven characters, up to 999 thousand millions."""
    for unit, size in (("G", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{value / size:.2f}{unit}"
    return f"{value:,.0f}"


def _branch_table(row: Trajectory, decode: Decode, fate: str) -> RenderableType:
    sampled = row.policy_versions != NOT_SAMPLED
    branch = _short_id(row, row.branch_id)
    parent = _short_id(row, row.parent_branch_id)
    title = f"\nbranch {branch}" + (f" of {parent}" if parent else "")
    title += f"  {len(row.token_ids)} tokens, {sampled.sum()} sampled, {row.loss_mask.sum()} {fate}"
    title += f"  versions {_version_range(row.policy_versions)}  interruptions {row.interruptions}"
    title += f"\ntools: {_tool_names(row.tools)}" if row.tools is not None else ""
    table = make_table()
    scored = any(turn.reward is not None for turn in row.turns)
    for name in ("role", "tokens", "finish", "engine", "versions", *(["reward"] if scored else [])):
        table.add_column(name, no_wrap=True)
    table.add_column("text", overflow="fold")
    own = [turn for turn in row.turns if turn.end > row.shared_prefix]
    if len(own) < len(row.turns):
        end = own[0].start if own else len(row.token_ids)
        blank = [""] * (4 if scored else 3)
        table.add_row("", f"0-{end}", *blank, Text(f"as in branch {parent}"), style="dim")
    for turn in own:
        table.add_row(
            Text(make_printable(turn.role)),
            f"{turn.start}-{turn.end}",
            turn.finish_reason or "",
            Text(make_printable(turn.engine or "")),
            _version_range(row.policy_versions[turn.start : turn.end]),
            *(["" if turn.reward is None else f"{turn.reward:g}"] if scored else []),
            _turn_text(row, turn, decode),
        )
    # a title of the table itself would be wrapped at the table's width
    return Group(Text(title, style="italic"), table)


def _images_table(run: RunDirectory, rows: Sequence[Trajectory]) -> RenderableType:
    table = make_table("\nwhat was seen")
    for name in ("branch", "tokens", "pixels", "file"):
        table.add_column(name, overflow="fold")
    for row in rows:
        for image in row.images:
            span = f"{image.start}-{image.start + image.length}"
            size = f"{image.width} by {image.height}"
            file = media_file(run.media_dir, image.sha256)
            table.add_row(_short_id(row, row.branch_id), span, size, Text(file))
    return table


def _output_text(text: str) -> RenderableType:
    lines = "\n".join(map(make_printable, text.splitlines()))
    return Text.assemble(("\nwhat the command wrote\n", "italic"), lines)


def _judgements_text(judged: Sequence[Judgement]) -> RenderableType:
    lines = [
        f"{judgement.judge or 'noted'}: {make_printable(describe_judgement(judgement))}"
        for judgement in judged
    ]
    return Text.assemble(("\nwhat judges said, and what was noted\n", "italic"), "\n".join(lines))


def _tool_names(definitions: str) -> str:
    """Names of the tools, as text."""
    return make_printable(", ".join(tool["function"]["name"] for tool in load_json(definitions)))


def _short_id(row: Trajectory, branch_id: str | None) -> str:
    return (branch_id or "").removeprefix(f"{row.session_id}.")


def _turn_text(row: Trajectory, turn: TurnSpan, decode: Decode) -> Text:
    """Text of the turn's tokens; runs of equal state (given, carried, trained) are decoded together."""
    span = slice(turn.start, turn.end)
    state = (row.policy_versions[span] != NOT_SAMPLED).astype(int) + row.loss_mask[span]
    cuts = np.flatnonzero(np.diff(state)) + 1
    text = Text()
    for ids, states in zip(np.split(row.token_ids[span], cuts), np.split(state, cuts), strict=True):
        part = make_printable(decode(ids.tolist()))
        style = ("", CARRIED, TRAINED)[states.max(initial=0)]
        text.append(f"«{part}»" if style else part, style)
    return text


def make_printable(text: str) -> str:
    """Text that cannot steer the terminal: policies sample anything, so unprintable characters are shown."""
    shown = text.replace("\n", "↵")
    return "".join(c if c.isprintable() else show(c) for c in shown)


def _version_range(versions: np.ndarray) -> str:
    sampled = versions[versions != NOT_SAMPLED]
    if not len(sampled):
        return ""
    low = int(sampled.min())
    high = int(sampled.max())
    return str(low) if low == high else f"{low}-{high}"


def _reward_text(row: Trajectory) -> str:
    if row.reward is None:
        return "none"
    parts = ", ".join(f"{make_printable(name)} {value:g}" for name, value in row.reward_parts.items())
    return f"{row.reward:g}" + (f" ({parts})" if parts else "")
