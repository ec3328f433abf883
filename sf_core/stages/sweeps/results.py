"""What the runs of a sweep have come to, run by run and setting by setting: means over seeds with their 95 %
intervals by Student's t, and the table of the sweep as Markdown for its page in Prefect, as cells for the
terminal, and as data for programs.
"""

from __future__ import annotations

import base64
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, Literal

from sf_core.reports.charts import SweepRow, draw_sweep
from sf_core.reports.states import is_finished
from sf_core.reports.view import RunView
from sf_core.stages.sweeps.sweep import AS_IT_IS, OpenSweep, Setting, SweepRun

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over runs that differ in their seeds alone."""

    value: float
    half: float | None
    """Half the length of the 95 % interval of the mean; None for a single run, which tells no spread."""
    count: int

    @classmethod
    def over(cls, values: Sequence[float]) -> Mean | None:
        """None without values."""
        if not values:
            return None
        half = None
        if len(values) > 1:
            error = statistics.stdev(values) / math.sqrt(len(values))
            half = t_quantile(len(values) - 1) * error
        return cls(statistics.fmean(values), half, len(values))

    def interval(self, least: float = -math.inf) -> tuple[float, float] | None:
        """The 95 % interval; `least` is the smallest value that there can be."""
        return None if self.half is None else (max(least, self.value - self.half), self.value + self.half)


@cache
def t_quantile(degrees: int) -> float:
    """How many standard errors the 95 % interval reaches to each side, with so many degrees of freedom.

    >>> round(t_quantile(2), 3)
    4.303
    """
    low = 0.0
    high = 16.0
    # the largest one is that of one degree, 12.7
    for _ in range(60):
        middle = (low + high) / 2
        if share_within(middle, degrees) < CONFIDENCE:
            low = middle
        else:
            high = middle
    return high


def share_within(t: float, degrees: int) -> float:
    """Probability that a variable with Student's t distribution is between -t and t: the finite sums of
    Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan2(t, math.sqrt(degrees))
    square = math.cos(angle) ** 2
    is_odd = degrees % 2 == 1
    term = math.cos(angle) if is_odd else 1.0
    total = term if degrees > 1 else 0.0
    for power in range(2 + is_odd, degrees - 1, 2):
        term *= square * (power - 1) / power
        total += term
    if is_odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total


RunState = Literal["finished", "failed", "unfinished"]


@dataclass(frozen=True, slots=True)
class RunResult:
    run_id: str
    setting: str
    """Label of its setting."""
    seed: int
    state: RunState
    iterations: int
    """Number of iterations that are through."""
    of_iterations: int
    failure: str | None = None
    before: float | None = None
    """Held-out reward before the first iteration."""
    reward: float | None = None
    """Held-out reward after the last iteration."""
    tokens: float | None = None
    """Number of tokens sampled."""
    seconds: float | None = None
    """Time of the iterations, without the time between two attempts."""

    @property
    def progress(self) -> str:
        return f"{self.iterations} of {self.of_iterations} iterations"


@dataclass(frozen=True, slots=True)
class SettingResult:
    """A setting over the seeds whose runs are finished."""

    setting: Setting
    runs: tuple[RunResult, ...]

    def mean(self, figure: str) -> Mean | None:
        return Mean.over([*self.values(figure)])

    def values(self, figure: str) -> list[float]:
        values = (getattr(run, figure) for run in self.finished)
        return [value for value in values if value is not None]

    @property
    def finished(self) -> list[RunResult]:
        return [run for run in self.runs if run.state == "finished"]


def read_results(opened: OpenSweep) -> list[SettingResult]:
    """The settings in their order, each with all of its runs. Raises ValueError if a file of a run is
    broken."""
    failures = opened.folder.read_failures()
    runs = [read_result(opened, run, failures) for run in opened.sweep.runs]
    return [
        SettingResult(setting, tuple(run for run in runs if run.setting == setting.label))
        for setting in opened.sweep.settings
    ]


def read_result(opened: OpenSweep, run: SweepRun, failures: Mapping[str, str]) -> RunResult:
    directory = opened.directory(run)
    due = int(run.config["train"]["iterations"])
    failure = failures.get(run.run_id)
    begun = RunResult(
        run_id=run.run_id,
        setting=run.setting,
        seed=run.seed,
        state="unfinished" if failure is None else "failed",
        iterations=0,
        of_iterations=due,
        failure=failure,
    )
    if not directory.exists():
        return begun
    view = RunView(directory)
    if not is_finished(view, due):
        return replace(begun, iterations=view.progress().published)
    summary = directory.read_summary() or {}
    return replace(
        begun,
        state="finished",
        failure=None,
        iterations=due,
        before=summary.get("reward_before"),
        reward=summary.get("reward_after"),
        tokens=summary.get("tokens_sampled"),
        seconds=summary.get("seconds_rl"),
    )


def unfinished(opened: OpenSweep) -> list[SweepRun]:
    """The runs that are left, in their order; those that failed are tried again."""
    return [run for run in opened.sweep.runs if read_result(opened, run, {}).state != "finished"]


def count_states(results: Sequence[SettingResult]) -> dict[RunState, int]:
    counts: dict[RunState, int] = {"finished": 0, "failed": 0, "unfinished": 0}
    for result in results:
        for run in result.runs:
            counts[run.state] += 1
    return counts


def describe_states(results: Sequence[SettingResult]) -> str:
    """
    >>> describe_states([])
    '0 of 0 runs are finished'
    """
    counts = count_states(results)
    parts = [f"{counts['finished']} of {sum(counts.values())} runs are finished"]
    if counts["failed"]:
        parts.append(f"{counts['failed']} failed")
    if refused := sum(result.setting.fault is not None for result in results):
        parts.append(f"{refused} {'setting was' if refused == 1 else 'settings were'} refused")
    return ", ".join(parts)


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
