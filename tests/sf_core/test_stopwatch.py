"""The computer's clock is set back by an hour while something is measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sf_core.scheduling.timeline import Timeline, read_spans
from sf_core.stages.run import OpenRun, RunRef, StageResult, commit
from sf_core.waits import Stopwatch, in_order, rate
from storage.run_directory import RunDirectory

HOUR_S = 3600.0


@pytest.fixture
def set_back(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    real = time.time
    return lambda: monkeypatch.setattr(time, "time", lambda: real() - HOUR_S)


def test_a_stopwatch_does_not_follow_the_clock(set_back: Callable[[], None]) -> None:
    watch = Stopwatch()
    set_back()
    assert 0 <= watch.seconds < HOUR_S / 2 and watch.now == pytest.approx(watch.since, abs=HOUR_S / 2)


def test_stored_times_of_several_clocks_are_put_in_order() -> None:
    assert in_order(2.0, 5.0) == (2.0, 5.0) and in_order(5.0, 2.0) == (5.0, 5.0)
    assert (rate(6, 2), rate(6, 0), rate(6, -1)) == (3.0, None, None)


def test_a_stage_ends_after_it_has_begun(tmp_path: Path, set_back: Callable[[], None]) -> None:
    run = OpenRun(RunRef("run-1", str(tmp_path / "run-1"), dataplane_url="", attempt=1))

    def work() -> StageResult:
        set_back()
        return StageResult()

    data = commit(run, 0, "publish", work).data
    assert 0 <= data["finished_at"] - data["started_at"] < HOUR_S / 2


def test_spans_end_after_they_have_begun(tmp_path: Path, set_back: Callable[[], None]) -> None:
    run = RunDirectory(str(tmp_path / "run-1"))
    with Timeline(run, "t0", "train", "train-0.1") as spans:
        with spans.record("busy", "train", 0):
            set_back()
        began = time.time() + HOUR_S
        spans.add("busy", "sample", began, time.time())
    read = read_spans(run)
    assert {span.label for span in read} == {"", "train", "sample"}
    assert all(0 <= span.end - span.start < HOUR_S / 2 for span in read)


def test_spans_of_earlier_versions_that_end_before_they_begin_have_no_length(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path / "run-1"))
    run.write_timeline("t0", 9.0, b'[{"worker": "t0", "tag": "train", "start": 9.0, "end": 2.0}]')
    [span] = read_spans(run)
    assert (span.start, span.end) == (9.0, 9.0)
