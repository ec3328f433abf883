"""What the devices of a run did, from its directory alone: figures per iteration, timeline.json and
timeline.png. Used by the `finish` stage, `sf inspect` and the run's page.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence

from sf_core.config import RunConfig
from sf_core.reports.pictures import draw_timeline
from sf_core.reports.trace import Bar, chrome_trace
from sf_core.reports.view import RunView
from sf_core.scheduling.figures import DeviceFigures, Window, device_figures
from sf_core.scheduling.timeline import MAX_UNWRITTEN_S, Span, read_spans
from storage import files
from storage.manifests import Manifest
from storage.metrics import read_metrics, write_metrics
from storage.run_directory import RunDirectory

NUM_DRAWN = 8
"""Number of iterations in timeline.png, the last ones."""

Figures = dict[str, float]

COLUMNS = {
    "utilisation_cluster": "busy all",
    "utilisation_train": "busy train",
    "utilisation_rollout": "busy rollout",
    "switches": "switches",
    "to_train_mean_s": "to train s",
    "to_rollout_mean_s": "to rollout s",
    "tokens_rollout_only": "tokens own",
    "tokens_lent": "tokens lent",
}
"""Figures in the order of a table, with their column titles."""

MAX_DEVICES = 8
"""Number of devices with a column in a table; the idle time of more is in the metrics."""


def loading(share: float) -> str:
    """Suffix of a device's idle share: the share of time spent loading, empty below half a percent."""
    return f" ({share:.0%} loading)" if share >= 0.005 else ""


def record_figures(view: RunView, newest: int, *, is_over: bool = False) -> None:
    """Write the figures of every iteration up to `newest` that has none yet and is settled, which means that
    its devices have written all spans in it.

    Engines write spans when they load weights, every 15 s and at the end. So an iteration is settled when the
    next one is published, when twice that time has passed, or when the run is over."""
    run, first = view.run, newest + 1
    while first > 0 and not files.exists(run.metrics_file("devices", first - 1)):
        first -= 1
    # the iteration before tells which tags the devices had before the first
    windows = view.windows(max(0, first - 1))
    due = [
        number
        for number, (_, end) in windows.items()
        if first <= number <= newest
        and (is_over or number < max(windows) or time.time() - end > 2 * MAX_UNWRITTEN_S)
    ]
    if not due:
        return
    spans = read_spans(run, since=windows[min(windows)][0])
    num_lags = run.read_config(RunConfig).lag_bound + 1
    for number in due:
        lags = view.iteration(number).stages["filter"].data["lags"]
        lags = [*lags, *[0] * (num_lags - len(lags))]
        write_metrics(run, "devices", number, [_row(device_figures(spans, windows[number]), lags)])


def read_figures(run: RunDirectory, iterations: Sequence[int]) -> dict[int, Figures]:
    """What `record_figures` has written of these iterations, by iteration."""
    uris = {k: run.metrics_file("devices", k) for k in iterations}
    return {k: read_metrics(uri)[0] for k, uri in uris.items() if files.exists(uri)}


def tokens_sampled(figures: Figures | None) -> float | None:
    """Tokens that all devices sampled in an iteration's window, whatever became of them; None where nothing
    is recorded."""
    return None if figures is None else figures["tokens_rollout_only"] + figures["tokens_lent"]


def draw_timelines(view: RunView) -> None:
    """Write timeline.json of the whole run and timeline.png of its last iterations. Takes time proportional
    to the length of the run."""
    run, spans = view.run, read_spans(view.run)
    trace = chrome_trace(run.run_id, spans, list(_bars(view)))
    files.write_atomic(run.trace_file, json.dumps(trace, separators=(",", ":")).encode())
    files.write_atomic(run.timeline_picture, _picture(run, view.windows(), spans))


def timeline_picture(view: RunView, newest: int) -> bytes:
    """timeline.png as bytes, of the iterations up to `newest`; reads no more spans than they need."""
    drawn = view.windows(max(0, newest + 1 - NUM_DRAWN))
    windows = {number: window for number, window in drawn.items() if number <= newest}
    since = min((start for start, _ in windows.values()), default=0.0)
    return _picture(view.run, windows, read_spans(view.run, since))


def table(figures: Mapping[int, Figures]) -> tuple[list[str], list[list[str]]]:
    """The figures of some iterations as text: column titles, and the cells of each row."""
    devices = sorted({name for row in figures.values() for name in row if name.startswith("idle_")})
    names = {name: f"idle {name.removeprefix('idle_')}" for name in devices[:MAX_DEVICES]} | COLUMNS
    rows = [
        [str(iteration), *(_cell(name, row.get(name)) + _loading(name, row) for name in names), _lags(row)]
        for iteration, row in sorted(figures.items())
    ]
    return ["#", *names.values(), "tokens by lag"], rows


def markdown_table(figures: Mapping[int, Figures]) -> str:
    """The same table in Markdown."""
    names, rows = table(figures)
    lines = [names, ["---:"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _picture(run: RunDirectory, windows: Mapping[int, Window], spans: Sequence[Span]) -> bytes:
    drawn = dict(list(windows.items())[-NUM_DRAWN:])
    return draw_timeline(title=f"run {run.run_id}", spans=spans, iterations=drawn)


def _cell(name: str, value: float | None) -> str:
    if value is None or math.isnan(value):
        return ""
    if name.startswith(("idle_", "utilisation_")):
        return f"{value:.0%}"
    return f"{value:.2f}" if name.endswith("_s") else f"{value:,.0f}"


def _loading(name: str, row: Figures) -> str:
    share = row.get(f"loading_{name.removeprefix('idle_')}", 0.0) if name.startswith("idle_") else 0.0
    return loading(share)


def _lags(row: Figures) -> str:
    return " ".join(f"{number:,.0f}" for name, number in row.items() if name.startswith("lag_"))


def _row(figures: DeviceFigures, lags: Sequence[int]) -> Figures:
    row: Figures = {"seconds": figures.seconds}
    row |= {f"idle_{worker}": share for worker, share in figures.idle.items()}
    row |= {f"loading_{worker}": share for worker, share in figures.loading.items()}
    row |= {
        "utilisation_train": figures.utilisation_train,
        "utilisation_rollout": figures.utilisation_rollout,
        "utilisation_cluster": figures.utilisation_cluster,
        "switches": len(figures.switches),
        "not_lent_cost": figures.not_lent["cost"],
        "not_lent_bound": figures.not_lent["bound"],
    }
    for name, costs in (("to_train", figures.costs_s("train")), ("to_rollout", figures.costs_s("rollout"))):
        row[f"{name}_mean_s"] = sum(costs) / len(costs) if costs else float("nan")
        row[f"{name}_max_s"] = max(costs, default=float("nan"))
    row |= {"tokens_rollout_only": figures.tokens_rollout_only, "tokens_lent": figures.tokens_lent}
    return row | {f"lag_{lag}": number for lag, number in enumerate(lags)}


def _bars(view: RunView) -> Iterator[Bar]:
    for number, window in view.windows().items():
        yield Bar("iterations", f"iteration {number}", *window, {})
    for iteration in view.iterations():
        for stage, manifest in iteration.stages.items():
            yield Bar(stage, f"{stage} {iteration.number}", *_time(manifest), {"attempt": manifest.attempt})
            for wait in manifest.data.get("waits", []):
                yield Bar(f"waits of {stage}", wait["what"], wait["start"], wait["end"], {})


def _time(manifest: Manifest) -> tuple[float, float]:
    return manifest.data["started_at"], manifest.data["finished_at"]
