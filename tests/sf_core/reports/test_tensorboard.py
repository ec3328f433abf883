import logging
from math import nan

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sf_core.reports.export.trackers import write_events
from storage import files
from storage.run_directory import RunDirectory
from storage.tables.metrics import write_metrics


def curve(run: RunDirectory, kind: str, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(run.path("tensorboard", kind)).Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard_reads_the_metrics_as_curves(empty_run: RunDirectory) -> None:
    for version in (0, 2):
        write_metrics(empty_run, "evaluation", version, [{"reward_mean": version / 4}])
    for number in range(3):
        write_metrics(
            empty_run, "train", number, [{"loss": 0.5 * number, "kl": nan if number == 0 else 0.25}]
        )
        write_events(empty_run, number)
    assert curve(empty_run, "train", "loss") == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert curve(empty_run, "train", "kl") == [(1, 0.25), (2, 0.25)]
    assert curve(empty_run, "evaluation", "reward_mean") == [(0, 0.0), (2, 0.5)]


def test_steps_of_an_iteration_follow_each_other(empty_run: RunDirectory) -> None:
    for number in range(2):
        write_metrics(empty_run, "train", number, [{"loss": 3.0}, {"loss": 2.0}])
    write_events(empty_run, 1)
    assert [step for step, _ in curve(empty_run, "train", "loss")] == [0, 1, 2, 3]


def test_what_is_not_through_yet_is_written_later(empty_run: RunDirectory) -> None:
    for number in range(2):
        write_metrics(empty_run, "train", number, [{"loss": 1.0}])
    write_events(empty_run, 0)
    assert curve(empty_run, "train", "loss") == [(0, 1.0)]
    write_events(empty_run, 1)
    assert curve(empty_run, "train", "loss") == [(0, 1.0), (1, 1.0)]


def test_a_failure_is_one_line_and_made_good_by_the_next_call(
    empty_run: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    write_metrics(empty_run, "train", 0, [{"loss": 1.0}])
    files.write_atomic(empty_run.path("tensorboard"), b"a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        write_events(empty_run, 0)
    assert [record.message.split(":")[0] for record in caplog.records] == ["run run-1"]
    files.remove(empty_run.path("tensorboard"))
    write_events(empty_run, 0)
    assert curve(empty_run, "train", "loss") == [(0, 1.0)]
