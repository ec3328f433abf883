"""Figures of devices, their table and pictures; and the Trace Event Format: required fields, their types, and
bars that nest on every track."""

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from PIL import Image

from sf_core.config import RunConfig
from sf_core.reports import timeline
from sf_core.reports.tables import inspect_timeline
from sf_core.reports.timeline import Bar, chrome_trace, record_devices, write_timelines
from sf_core.reports.view import RunView
from sf_core.scheduling.timeline import Span
from storage import files
from storage.run_directory import STAGES, RunDirectory
from tests.bench.reports import spans
from tests.bench.reports.tables import shown
from tests.bench.runs import commit

AT = 1.7e9
BARS = [
    Bar("iterations", "iteration 0", AT, AT + 9, {}),
    Bar("rollout", "rollout 0", AT, AT + 4, {"attempt": 1}),
    Bar("waits of rollout", "batch 0", AT + 0.5, AT + 3.9, {}),
    Bar("iterations", "iteration 1", AT + 9, AT + 20, {}),
]


@pytest.fixture
def trace() -> dict[str, Any]:
    moved = [
        Span(s.worker, s.tag, s.start + AT, s.end + AT, s.kind, s.label, s.version, s.lease, s.tokens)
        for s in (*spans.R0, *spans.T0)
    ]
    trace: dict[str, Any] = json.loads(json.dumps(chrome_trace("run-1", moved, BARS), allow_nan=False))
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


def commit_iteration(run: RunDirectory, number: int, start: float, end: float) -> None:
    for i, stage in enumerate(STAGES):
        width = (end - start) / len(STAGES)
        times = {"started_at": start + i * width, "finished_at": start + (i + 1) * width}
        more = {"filter": {"lags": [30, 10]}}.get(stage, {})
        waits = [{"what": f"batch {number}", "start": start, "end": start + 0.5}]
        data = times | more | ({"waits": waits} if stage == "rollout" else {})
        commit(run, number, stage, data=data)


@pytest.fixture
def timed_run(runs_root: str) -> RunDirectory:
    run = RunDirectory(f"{runs_root}/run-1")
    run.write_config(RunConfig(run_id="run-1"))
    for number in range(3):
        at = spans.AT + 10 * number
        commit_iteration(run, number, at, at + 10)
        spans.write_spans(
            run,
            Span("t0", "rollout", at, at + 4, "held", "", None, f"t0-{number}"),
            Span("t0", "rollout", at + 1, at + 3, "busy", "sample", number, f"t0-{number}", 100),
            Span("t0", "rollout", at + 3, at + 4, "moving", "yield", number, f"t0-{number}"),
        )
        spans.write_spans(
            run,
            Span("t0", "train", at + 4, at + 9, "held", "", None, f"train-{number}"),
            Span("t0", "train", at + 4, at + 5, "moving", "load trainer", number, f"train-{number}"),
            Span("t0", "train", at + 5, at + 8, "busy", "train", number, f"train-{number}"),
            Span("t0", "train", at + 8, at + 9, "moving", "save", number, f"train-{number}"),
        )
    return run


def test_figures_of_an_iteration_are_a_row_of_metrics(timed_run: RunDirectory) -> None:
    record_devices(RunView(timed_run), 2, is_over=True)
    row = RunView(timed_run).read_devices(range(3))[1]
    assert (row["iteration"], row["seconds"], row["idle_t0"]) == (1, 10, 0.5)
    assert row["loading_t0"] == 0.1
    assert (row["utilisation_train"], row["utilisation_rollout"]) == (pytest.approx(0.3), pytest.approx(0.2))
    # from the revoke to the first work; from the end of training, in the iteration before, to the first token
    assert (row["to_train_mean_s"], row["to_rollout_max_s"]) == (2.0, 5.0)
    assert (row["switches"], row["tokens_lent"], row["tokens_rollout_only"]) == (2, 100, 0)
    assert (row["lag_0"], row["lag_1"]) == (30, 10)


def test_the_figures_of_all_iterations_read_as_one_table(timed_run: RunDirectory, tmp_path: Path) -> None:
    record_devices(RunView(timed_run), 2, is_over=True)
    if files.is_local(timed_run.uri):
        table = pq.read_table(timed_run.path("metrics", "devices"))
        assert sorted(table["iteration"].to_pylist()) == [0, 1, 2]


def test_figures_are_written_once_and_the_same_whenever_that_is(timed_run: RunDirectory) -> None:
    record_devices(RunView(timed_run), 1, is_over=True)
    early = RunView(timed_run).read_devices(range(3))
    assert list(early) == [0, 1]
    record_devices(RunView(timed_run), 2, is_over=True)
    late = RunView(timed_run).read_devices(range(3))
    assert {k: repr(late[k]) for k in early} == {k: repr(early[k]) for k in early}  # NaN is not NaN
    for k in range(3):
        files.remove(timed_run.metrics_file("devices", k))
    record_devices(RunView(timed_run), 2, is_over=True)
    assert repr(RunView(timed_run).read_devices(range(3))) == repr(late)


def test_an_iteration_whose_devices_may_still_write_has_no_figures_yet(
    timed_run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline.time, "time", lambda: spans.AT + 31)  # a second after the end of the last
    record_devices(RunView(timed_run), 2)
    assert list(RunView(timed_run).read_devices(range(3))) == [0, 1]


def test_timelines_are_drawn_from_the_directory_alone(timed_run: RunDirectory, tmp_path: Path) -> None:
    write_timelines(RunView(timed_run))
    events = json.loads(files.read_bytes(timed_run.trace_file))["traceEvents"]
    assert {"iteration 2", "train 1", "batch 0", "yield"} <= {event["name"] for event in events}
    (tmp_path / "copy.png").write_bytes(files.read_bytes(timed_run.timeline_picture))
    with Image.open(tmp_path / "copy.png") as picture:
        assert picture.width > 1000
        assert picture.convert("RGB").getpixel((0, 0)) == (255, 255, 255)


def test_an_iteration_under_way_is_drawn_as_far_as_it_is(timed_run: RunDirectory) -> None:
    files.remove(timed_run.manifest_file(2, "publish"))
    write_timelines(RunView(timed_run))
    names = {event["name"] for event in json.loads(files.read_bytes(timed_run.trace_file))["traceEvents"]}
    assert "train 2" in names
    assert "iteration 2" not in names


def test_devices_are_shown_as_a_table(timed_run: RunDirectory) -> None:
    lines = shown(inspect_timeline(timed_run.uri)).splitlines()
    assert lines[4].split()[:6] == ["#", "t0", "all", "train", "rollout", "switches"]
    assert "50% (10% loading)" in lines[6]
    assert lines[6].replace(" (10% loading)", "").split() == [
        "1",
        "50%",
        "50%",
        "30%",
        "20%",
        "2",
        "2.00",
        "5.00",
        "0",
        "100",
        "30",
        "10",
    ]
    assert timed_run.timeline_picture in " ".join(lines)
