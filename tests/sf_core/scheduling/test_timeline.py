from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sf_core.scheduling.timeline import Span, Timeline, idle_fraction, read_spans
from storage.run_directory import RunDirectory


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 30)), max_size=20))
def test_idle_fraction_is_the_share_of_moments_that_no_span_covers(bars: list[tuple[int, int]]) -> None:
    spans = [Span("t0", "rollout", start, start + length) for start, length in bars]
    covered = {moment for start, length in bars for moment in range(start, start + length) if moment < 100}
    assert idle_fraction(spans, (0, 100)) == round(1 - len(covered) / 100, 6)


def test_a_device_that_loads_or_waits_is_idle() -> None:
    spans = [
        Span("t0", "rollout", 0, 10, "held"),
        Span("t0", "rollout", 0, 4, "moving", "load engine"),
        Span("t0", "rollout", 4, 6, "busy", "sample"),
        Span("t0", "rollout", 6, 10, "wait", "requests"),
    ]
    assert idle_fraction(spans, (0, 10)) == 0.8


def test_spans_of_several_leases_are_read_back_in_order(tmp_path: Path) -> None:
    directory = RunDirectory(str(tmp_path / "run"))
    for tag, start in (("train", 5.0), ("rollout", 1.0)):
        with Timeline(directory, "t0", tag, f"{tag}-0.1") as timeline:
            timeline.add("busy", tag, start, start + 1, version=3, tokens=7)
    busy = [span for span in read_spans(directory) if span.kind == "busy"]
    assert [span.tag for span in busy] == ["rollout", "train"]
    assert (busy[0].version, busy[0].lease, busy[0].tokens) == (3, "rollout-0.1", 7)


def test_a_lease_that_wrote_several_parts_was_held_once(tmp_path: Path) -> None:
    directory = RunDirectory(str(tmp_path / "run"))
    with Timeline(directory, "r0", "rollout", "r0.1") as timeline:
        for _ in range(3):
            with timeline.record("busy", "sample"):
                pass
            timeline.flush()
    spans = read_spans(directory)
    assert [span.kind for span in spans].count("held") == 1
    assert [span.kind for span in spans].count("busy") == 3
    held = spans[0]
    assert held.start <= spans[1].start and spans[-1].end <= held.end


def test_only_what_ended_lately_is_read(tmp_path: Path) -> None:
    directory = RunDirectory(str(tmp_path / "run"))
    directory.write_timeline("r0-rollout-r0.1", 10.0, b'[{"worker":"r0","tag":"x","start":1,"end":2}]')
    directory.write_timeline("r0-rollout-r0.1", 20.0, b'[{"worker":"r0","tag":"x","start":15,"end":16}]')
    assert [span.start for span in read_spans(directory, since=15.0)] == [15]


def test_spans_that_cannot_be_written_are_an_error_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "timeline").write_text("in the way", encoding="utf-8")
    timeline = Timeline(RunDirectory(str(tmp_path / "run")), "r0", "rollout", "r0.1")
    with pytest.raises(OSError), timeline:
        timeline.flush()
