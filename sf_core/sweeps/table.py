"""The table of a sweep: Markdown for its page in Prefect, cells for the terminal, data for programs."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from sf_core.reports.charts import SweepRow, draw_sweep
from sf_core.sweeps.results import RunResult, SettingResult, describe_states
from sf_core.sweeps.statistics import Mean
from sf_core.sweeps.sweep import AS_IT_IS, OpenSweep

HEADINGS = ("setting", "seeds", "held-out reward", "tokens sampled", "seconds")

FIGURES = ("reward", "tokens", "seconds")
"""Figures of runs that a table has the means of, in the order of its columns."""

LEAST = {"tokens": 0.0, "seconds": 0.0}
"""Smallest values that figures can have. Of rewards none is known."""

LEGEND = (
    "Mean ± half the 95 % interval of the mean, by Student's t over the seeds whose runs are finished. One "
    "seed has no interval. Seconds: the time of the iterations."
)


def setting_row(result: SettingResult) -> list[str]:
    """The cells of a setting below `HEADINGS`."""
    seeds = f"{len(result.finished)} of {len(result.runs)}"
    reward, tokens, seconds = (result.mean(figure) for figure in FIGURES)
    return [
        result.setting.label,
        seeds,
        _cell(reward, ".3f"),
        _cell(tokens, ",.0f"),
        _cell(seconds, ",.0f"),
    ]


def _cell(mean: Mean | None, form: str) -> str:
    if mean is None:
        return "-"
    return f"{mean.value:{form}}" + ("" if mean.half is None else f" ± {mean.half:{form}}")


def list_faults(results: Sequence[SettingResult]) -> list[str]:
    """A sentence about each setting that was refused, each run that failed, and each that is not finished."""
    refused = [f"{r.setting.label} has no runs: {r.setting.fault}" for r in results if r.setting.fault]
    runs = [run for result in results for run in result.runs]
    failed = [
        f"{run.run_id} failed after {run.progress}: {run.failure}" for run in runs if run.state == "failed"
    ]
    left = [f"{run.run_id}: {_left(run)}" for run in runs if run.state == "unfinished"]
    return [*refused, *failed, *left]


def _left(run: RunResult) -> str:
    return run.progress if run.iterations else "not begun"


def to_data(opened: OpenSweep, results: Sequence[SettingResult]) -> dict[str, Any]:
    """The sweep as one JSON document."""
    return {
        "sweep": opened.sweep.name,
        "settings": [
            {
                "values": dict(result.setting.values),
                "fault": result.setting.fault,
                **{figure: _mean_data(result.mean(figure)) for figure in FIGURES},
                "runs": [_run_data(run) for run in result.runs],
            }
            for result in results
        ],
    }


def _mean_data(mean: Mean | None) -> dict[str, Any] | None:
    return None if mean is None else {"mean": mean.value, "half_interval": mean.half, "seeds": mean.count}


def _run_data(run: RunResult) -> dict[str, Any]:
    return {name: value for name, value in asdict(run).items() if name != "setting"}


def draw(opened: OpenSweep, results: Sequence[SettingResult]) -> bytes:
    """The picture of a sweep, as PNG."""
    rows = [_row(result) for result in results if result.runs]
    befores = [before for result in results for before in result.values("before")]
    before = sum(befores) / len(befores) if befores else None
    return draw_sweep(opened.sweep.name, rows, before)


def _row(result: SettingResult) -> SweepRow:
    means: dict[str, float] = {}
    intervals: dict[str, tuple[float, float]] = {}
    for figure in FIGURES:
        mean = result.mean(figure)
        if mean is None:
            continue
        means[figure] = mean.value
        interval = mean.interval(LEAST.get(figure, -math.inf))
        if interval is not None:
            intervals[figure] = interval
    points = {figure: result.values(figure) for figure in FIGURES}
    return SweepRow(_shorten(result.setting.values), points=points, means=means, intervals=intervals)


def _shorten(values: Mapping[str, str]) -> str:
    """A setting in a picture, with a line for each value."""
    lasts = [key.rpartition(".")[2] for key in values]
    is_clear = len(set(lasts)) == len(lasts)
    names = lasts if is_clear else list(values)
    lines = [f"{name}={text}" for name, text in zip(names, values.values(), strict=True)]
    return "\n".join(lines) or AS_IT_IS


def to_markdown(opened: OpenSweep, results: Sequence[SettingResult], going_on: Sequence[str] = ()) -> str:
    """The page of a sweep in Prefect; `going_on` are the runs that compute now. A server cannot read files,
    so the picture is in the text."""
    rows = [[f"`{row[0].replace('`', '')}`", *row[1:]] for row in map(setting_row, results)]
    faults = [fault for fault in list_faults(results) if fault.partition(":")[0] not in going_on]
    parts = [
        f"# Sweep {opened.sweep.name}",
        f"{describe_states(results)}."
        + (f" Running now: {', '.join(map(escape, going_on))}." if going_on else ""),
        _table(rows),
        LEGEND,
        *_picture(opened, results),
        *(["## What is missing", "\n".join(f"- {escape(fault)}" for fault in faults)] if faults else []),
        f"Runs are in `{opened.folder.root}`. `sf sweep --show {opened.sweep.name}` prints this table.",
    ]
    return "\n\n".join(parts) + "\n"


def _picture(opened: OpenSweep, results: Sequence[SettingResult]) -> list[str]:
    """The picture, as soon as there is a run to draw."""
    if not any(result.finished for result in results):
        return []
    picture = base64.b64encode(draw(opened, results)).decode()
    return [f"![mean and 95 % interval per setting](data:image/png;base64,{picture})"]


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cell.replace('|', '¦') for cell in cells)} |" for cells in (HEADINGS, *rows)]
    rule = f"|---|{'---:|' * (len(HEADINGS) - 1)}"
    return "\n".join([lines[0], rule, *lines[1:]])


def escape(text: str) -> str:
    """Text of a user or a policy within Markdown, on one line and shown as it is."""
    return re.sub(r"([\\`*_{}\[\]<>#|!&~])", r"\\\1", " ".join(text.split()))
