"""A run's timeline in Chrome's Trace Event Format, for Perfetto (ui.perfetto.dev) and chrome://tracing.

The format: "Trace Event Format", Google, 2016 (complete events `X`, metadata events `M`). A process is a
worker, or the run itself; its threads are tracks. Times are microseconds since the run's first span.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sf_core.scheduling.figures import by_worker
from sf_core.scheduling.timeline import Span

Event = dict[str, Any]

RUN = 1
"""Process id of the run; those of workers follow."""

TRACKS = {"held": (1, "active tag"), "busy": (2, "busy"), "moving": (2, "busy"), "wait": (3, "waits")}


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar in the run's own tracks: an iteration, a stage or a wait."""

    track: str
    name: str
    start: float
    """Unix seconds."""
    end: float
    facts: Mapping[str, Any]


def chrome_trace(run_id: str, spans: Sequence[Span], bars: Sequence[Bar]) -> dict[str, Any]:
    """The trace file as a JSON object. The run's tracks are in the order in which `bars` name them."""
    origin = min([*(span.start for span in spans), *(bar.start for bar in bars)], default=0.0)
    events = list(_named(RUN, f"run {run_id}"))
    tracks = list(dict.fromkeys(bar.track for bar in bars))
    for number, track in enumerate(tracks, 1):
        events += _track(RUN, number, track)
    for bar in bars:
        where = (RUN, 1 + tracks.index(bar.track))
        events.append(_complete(*where, bar.name, bar.track, bar.start - origin, bar.end - origin, bar.facts))
    for process, (worker, own) in enumerate(by_worker(spans).items(), RUN + 1):
        events += _named(process, worker)
        for number, track in sorted(set(TRACKS.values())):
            events += _track(process, number, track)
        events += [_device_event(process, span, origin) for span in own]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"run_id": run_id, "unix_start": origin},
    }


def _device_event(process: int, span: Span, origin: float) -> Event:
    facts = {"tag": span.tag, "lease": span.lease, "version": span.version, "tokens": span.tokens or None}
    track, _ = TRACKS[span.kind]
    name = span.tag if span.kind == "held" else span.label
    known = {key: value for key, value in facts.items() if value is not None}
    return _complete(process, track, name, span.kind, span.start - origin, span.end - origin, known)


def _complete(
    process: int, track: int, name: str, category: str, start: float, end: float, facts: Mapping[str, Any]
) -> Event:
    # the end is rounded, not the duration, so that adjacent events do not overlap
    begin = round(start * 1e6)
    duration = max(0, round(end * 1e6) - begin)
    return {
        "ph": "X",
        "pid": process,
        "tid": track,
        "name": name or category,
        "cat": category,
        "ts": begin,
        "dur": duration,
        "args": dict(facts),
    }


def _named(process: int, name: str) -> Iterable[Event]:
    yield {"ph": "M", "pid": process, "tid": 0, "ts": 0, "name": "process_name", "args": {"name": name}}
    yield {
        "ph": "M",
        "pid": process,
        "tid": 0,
        "ts": 0,
        "name": "process_sort_index",
        "args": {"sort_index": process},
    }


def _track(process: int, track: int, name: str) -> list[Event]:
    where = {"ph": "M", "pid": process, "tid": track, "ts": 0}
    return [
        {**where, "name": "thread_name", "args": {"name": name}},
        {**where, "name": "thread_sort_index", "args": {"sort_index": track}},
    ]
