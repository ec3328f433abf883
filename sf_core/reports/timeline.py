"""A run's timeline: timeline.png of its last iterations, and timeline.json for Perfetto (ui.perfetto.dev) and
chrome://tracing.

The format of the latter: "Trace Event Format", Google, 2016 (complete events `X`, metadata events `M`). A
process is a worker, or the run itself; its threads are tracks. Times are microseconds since the run's first
span.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sf_core.reports.pictures import draw_timeline
from sf_core.reports.series import RunSeries
from sf_core.reports.view import RunView, stage_time
from sf_core.scheduling.figures import by_worker
from sf_core.scheduling.timeline import Span, read_spans
from storage import files

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
    series = RunSeries(view)
    trace = chrome_trace(run.run_id, series.spans, list(_bars(series)))
    files.write_atomic(run.trace_file, json.dumps(trace, separators=(",", ":")).encode())
    files.write_atomic(run.timeline_picture, _picture(series, series.spans))


def draw_newest(view: RunView, newest: int) -> bytes:
    """timeline.png as bytes, of the iterations up to `newest`; reads no more spans than they need."""
    series = RunSeries(view, max(0, newest + 1 - NUM_DRAWN), newest)
    since = min((start for start, _ in series.windows.values()), default=0.0)
    return _picture(series, read_spans(view.run, since))


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


def _picture(series: RunSeries, spans: Sequence[Span]) -> bytes:
    drawn = dict(list(series.windows.items())[-NUM_DRAWN:])
    return draw_timeline(title=f"run {series.run.run_id}", spans=spans, iterations=drawn)


def _bars(series: RunSeries) -> Iterator[Bar]:
    for number, window in series.windows.items():
        yield Bar("iterations", f"iteration {number}", *window, {})
    for iteration in series.iterations:
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


def _label(process: int, track: int, what: str, name: str) -> Iterator[Event]:
    where = {"ph": "M", "pid": process, "tid": track, "ts": 0}
    yield {**where, "name": f"{what}_name", "args": {"name": name}}
    yield {**where, "name": f"{what}_sort_index", "args": {"sort_index": track or process}}
