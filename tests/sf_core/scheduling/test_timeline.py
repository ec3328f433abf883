from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from sf_core.scheduling.timeline import Span, Timeline, gaps, idle_fraction, read_spans
from storage.run_directory import RunDirectory


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 30)), max_size=20))
def test_idle_fraction_is_the_share_of_moments_that_no_span_covers(bars: list[tuple[int, int]]) -> None:
    spans = [Span("t0", "rollout", start, start + length) for start, length in bars]
    covered = {moment for start, length in bars for moment in range(start, start + length) if moment < 100}
    assert idle_fraction(spans, (0, 100)) == round(1 - len(covered) / 100, 6)


def test_gaps_are_measured_only_where_the_active_tag_changes() -> None:
    spans = [
        Span("t0", "rollout", 0, 1, "held"),
        Span("t0", "rollout", 2, 3, "held"),
        Span("t0", "rollout", 2.5, 2.75),
        Span("t0", "train", 3.5, 5, "held"),
        Span("t0", "rollout", 6, 7, "held"),
    ]
    assert gaps(spans) == [("rollout->train", 0.5), ("train->rollout", 1)]


def test_spans_of_several_writers_are_read_back_in_order(tmp_path: Path) -> None:
    directory = RunDirectory(str(tmp_path / "run"))
    for tag, start in (("train", 5.0), ("rollout", 1.0)):
        timeline = Timeline(directory, "t0", tag, f"1-{tag}")
        timeline.busy(start, start + 1)
        timeline.write()
    assert [span.tag for span in read_spans(directory) if span.kind == "busy"] == ["rollout", "train"]
