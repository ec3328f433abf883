"""What the devices of a run did, from the spans of its timeline.

The figures of each iteration are recorded as metrics, because they take all spans of its time. timeline.png
shows the last iterations. timeline.json shows the whole run in Perfetto (ui.perfetto.dev) or
chrome://tracing.

The format of timeline.json: "Trace Event Format", Google, 2016 (complete events `X`, metadata events `M`). A
process is a worker, or the run itself; its threads are tracks. Times are microseconds since the run's first
span.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sf_core.reports.charts import draw_timeline
from sf_core.reports.iterations import stage_time
from sf_core.reports.view import DeviceRow, RunView
from sf_core.scheduling.figures import DeviceFigures, by_worker, device_figures
from sf_core.scheduling.timeline import MAX_UNWRITTEN_S, Span, read_spans
from storage import files
from storage.tables.metrics import write_metrics

Event = dict[str, Any]

TRACKS = {"held": "active tag", "busy": "busy", "moving": "busy", "wait": "waits"}
"""A worker's tracks, by the kind of span."""

NUM_DRAWN = 8
"""Number of iterations in timeline.png, the last ones."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar in the tracks of the run, an iteration, a stage or a wait, or in those of a worker."""

    track: str
    name: str
    start: float
    """Unix seconds."""
    end: float
    facts: Mapping[str, Any]
    category: str = ""
    """Empty: the track."""


def write_timelines(view: RunView) -> None:
    """Write timeline.json of the whole run and timeline.png of its last iterations. Takes time proportional
    to the length of the run."""
    run = view.run
    trace = chrome_trace(run.run_id, view.spans, list(_bars(view)))
    files.write_atomic(run.trace_file, json.dumps(trace, separators=(",", ":")).encode())
    files.write_atomic(run.timeline_picture, _chart(view, view.spans))


def draw_newest(view: RunView, newest: int) -> bytes:
    """timeline.png as bytes, of the iterations up to `newest`; reads no more spans than they need."""
    drawn = view.between(max(0, newest + 1 - NUM_DRAWN), newest)
    since = min((start for start, _ in drawn.windows.values()), default=0.0)
    return _chart(drawn, read_spans(view.run, since))


def record_devices(view: RunView, newest: int, *, is_over: bool = False) -> None:
    """Write the figures of every iteration up to `newest` that has none yet and is settled, which means that
    its devices have written all spans in it.

    Engines write spans when they load weights, every 15 s and at the end. So an iteration is settled when the
    next one is published, when twice that time has passed, or when the run is over."""
    run = view.run
    first = newest + 1
    while first > 0 and not files.exists(run.metrics_file("devices", first - 1)):
        first -= 1
    # the iteration before tells which tags the devices had before the first
    windows = view.between(max(0, first - 1)).windows
    unrecorded = [
        number
        for number, (_, end) in windows.items()
        if first <= number <= newest
        and (is_over or number < max(windows) or time.time() - end > 2 * MAX_UNWRITTEN_S)
    ]
    if not unrecorded:
        return
    spans = read_spans(run, since=windows[min(windows)][0])
    num_lags = view.config.lag_bound + 1
    for number in unrecorded:
        lags = view.iteration(number).stages["filter"].data.get("lags", [])
        lags = [*lags, *[0] * (num_lags - len(lags))]
        write_metrics(run, "devices", number, [_device_row(device_figures(spans, windows[number]), lags)])


def chrome_trace(run_id: str, spans: Sequence[Span], bars: Sequence[Bar]) -> dict[str, Any]:
    """The trace file as a JSON object. The run's tracks are in the order in which `bars` name them."""
    origin = min([*(span.start for span in spans), *(bar.start for bar in bars)], default=0.0)
    events = list(_process(1, f"run {run_id}", [bar.track for bar in bars], bars, origin))
    for process, (worker, own) in enumerate(by_worker(spans).items(), 2):
        events += _process(process, worker, TRACKS.values(), map(_bar, own), origin)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"run_id": run_id, "unix_start": origin},
    }


def _chart(view: RunView, spans: Sequence[Span]) -> bytes:
    drawn = dict(list(view.windows.items())[-NUM_DRAWN:])
    return draw_timeline(title=f"run {view.run.run_id}", spans=spans, iterations=drawn)


def _bars(view: RunView) -> Iterator[Bar]:
    for number, window in view.windows.items():
        yield Bar("iterations", f"iteration {number}", *window, {})
    for iteration in view.iterations:
        for stage, manifest in iteration.stages.items():
            name = f"{stage} {iteration.number}"
            facts = {"attempt": manifest.attempt}
            yield Bar(stage, name, *stage_time(manifest), facts)
            for wait in manifest.data.get("waits", []):
                yield Bar(f"waits of {stage}", wait["what"], wait["start"], wait["end"], {})


def _bar(span: Span) -> Bar:
    facts: dict[str, Any] = {"tag": span.tag, "lease": span.lease}
    if span.version is not None:
        facts["version"] = span.version
    if span.tokens:
        facts["tokens"] = span.tokens
    name = span.tag if span.kind == "held" else span.label
    return Bar(TRACKS[span.kind], name, span.start, span.end, facts, span.kind)


def _process(
    process: int, name: str, tracks: Iterable[str], bars: Iterable[Bar], origin: float
) -> Iterator[Event]:
    yield from _label(process, 0, "process", name)
    numbers = {track: number for number, track in enumerate(dict.fromkeys(tracks), 1)}
    for track, number in numbers.items():
        yield from _label(process, number, "thread", track)
    for bar in bars:
        # the end is rounded, not the duration, so that adjacent events do not overlap
        begin = round((bar.start - origin) * 1e6)
        category = bar.category or bar.track
        yield {
            "ph": "X",
            "pid": process,
            "tid": numbers[bar.track],
            "name": bar.name or category,
            "cat": category,
            "ts": begin,
            "dur": max(0, round((bar.end - origin) * 1e6) - begin),
            "args": dict(bar.facts),
        }


def _label(process: int, track: int, subject: str, name: str) -> Iterator[Event]:
    where = {"ph": "M", "pid": process, "tid": track, "ts": 0}
    yield {**where, "name": f"{subject}_name", "args": {"name": name}}
    yield {**where, "name": f"{subject}_sort_index", "args": {"sort_index": track or process}}


def _device_row(figures: DeviceFigures, lags: Sequence[int]) -> DeviceRow:
    row: DeviceRow = {"seconds": figures.seconds}
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
