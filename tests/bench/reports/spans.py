"""Spans of a run's timeline."""

from __future__ import annotations

import json

from sf_core.scheduling.timeline import Span
from storage.run_directory import RunDirectory

AT = 1000.0
"""A time in the past, so that all spans count as written."""


def write_spans(run: RunDirectory, *spans: Span) -> None:
    data = json.dumps([{name: getattr(span, name) for name in span.__slots__} for span in spans])
    run.write_timeline(f"{spans[0].worker}-{spans[0].lease}", spans[-1].end, data.encode())


T0 = [
    Span("t0", "rollout", 0, 4.5, "held", lease="t0-0"),
    Span("t0", "rollout", 0, 4, "busy", "sample", 0, "t0-0", 400),
    Span("t0", "rollout", 4, 4.4, "moving", "yield", 0, "t0-0"),
    Span("t0", "train", 5, 9, "held", lease="train-0"),
    Span("t0", "train", 5, 5.5, "moving", "load trainer", 0, "train-0"),
    Span("t0", "train", 5.5, 8, "busy", "train", 0, "train-0"),
    Span("t0", "train", 8, 9, "moving", "save", 0, "train-0"),
    Span("t0", "rollout", 9.2, 20, "held", lease="t0-1"),
    Span("t0", "rollout", 9.2, 10, "moving", "load engine", 1, "t0-1"),
    Span("t0", "rollout", 10, 10.5, "busy", "sample", 1, "t0-1", 1),
    Span("t0", "rollout", 10.5, 12.5, "busy", "sample", 1, "t0-1", 200),
]
R0 = [
    Span("r0", "rollout", 0, 20, "held", lease="r0"),
    Span("r0", "rollout", 0, 10, "busy", "sample", 0, "r0", 1000),
]
