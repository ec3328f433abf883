"""Checks of the Trace Event Format: required fields, their types, and bars that nest on every track."""

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest

from sf_core.reports.timeline import Bar, chrome_trace
from sf_core.scheduling.timeline import Span
from tests.bench.reports.spans import R0, T0

AT = 1.7e9
BARS = [
    Bar("iterations", "iteration 0", AT, AT + 9, {}),
    Bar("rollout", "rollout 0", AT, AT + 4, {"attempt": 1}),
    Bar("waits of rollout", "batch 0", AT + 0.5, AT + 3.9, {}),
    Bar("iterations", "iteration 1", AT + 9, AT + 20, {}),
]


@pytest.fixture
def trace() -> dict[str, Any]:
    spans = [
        Span(s.worker, s.tag, s.start + AT, s.end + AT, s.kind, s.label, s.version, s.lease, s.tokens)
        for s in (*R0, *T0)
    ]
    trace: dict[str, Any] = json.loads(json.dumps(chrome_trace("run-1", spans, BARS), allow_nan=False))
    return trace


def test_every_event_has_what_the_format_requires(trace: dict[str, Any]) -> None:
    assert trace["displayTimeUnit"] in ("ms", "ns")
    for event in trace["traceEvents"]:
        assert event["ph"] in ("X", "M")
        assert isinstance(event["name"], str) and event["name"]
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert isinstance(event["ts"], int) and event["ts"] >= 0
        assert isinstance(event["args"], dict)
        if event["ph"] == "X":
            assert isinstance(event["dur"], int) and event["dur"] >= 0
            assert isinstance(event["cat"], str)
        else:
            known = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}
            assert event["name"] in known


def test_a_process_is_a_worker_and_has_tracks_for_tag_work_and_waits(trace: dict[str, Any]) -> None:
    names: dict[int, str] = {}
    tracks: dict[int, list[str]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["name"] == "process_name":
            names[event["pid"]] = event["args"]["name"]
        if event["name"] == "thread_name":
            tracks[event["pid"]].append(event["args"]["name"])
    assert {names[pid]: found for pid, found in tracks.items()} == {
        "run run-1": ["iterations", "rollout", "waits of rollout"],
        "r0": ["active tag", "busy", "waits"],
        "t0": ["active tag", "busy", "waits"],
    }


def test_time_is_in_microseconds_since_the_first_span(trace: dict[str, Any]) -> None:
    [training] = [event for event in trace["traceEvents"] if event["name"] == "train" and event["tid"] == 2]
    assert (training["ts"], training["dur"]) == (5_500_000, 2_500_000)
    assert training["args"] == {"tag": "train", "lease": "train-0", "version": 0}


def test_bars_on_a_track_follow_each_other(trace: dict[str, Any]) -> None:
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for bars in tracks.values():
        bars.sort()
        assert all(before[1] <= after[0] for before, after in pairwise(bars))


def test_a_run_without_spans_is_an_empty_trace() -> None:
    assert [event["ph"] for event in chrome_trace("run-1", [], [])["traceEvents"]] == ["M", "M"]
