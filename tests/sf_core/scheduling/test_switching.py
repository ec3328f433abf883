from __future__ import annotations

import time
from contextlib import suppress

import pytest

from sf_core.dataplane.api_schemas import EnginePace
from sf_core.scheduling.figures import device_figures
from sf_core.scheduling.lending import LendingGate, Switching, WorkLeft, work_left
from sf_core.scheduling.timeline import Timeline, read_spans
from sf_core.scheduling.worker_state import WorkerState
from sf_core.training.gang import GangError
from storage.run_directory import RunDirectory


def engine(worker: str, tokens: int, seconds: float, version: int | None = 0) -> EnginePace:
    return EnginePace(worker=worker, version=version, tokens=tokens, seconds=seconds)


def test_the_work_left_is_timed_by_the_engines_that_are_not_lent() -> None:
    engines = [engine("r0", 500, 10.0), engine("r1", 300, 6.0), engine("t0", 900, 1.0)]
    work = work_left(1000.0, engines, trainers=("t0", "t1"))
    assert (work.dedicated, work.lent, work.units) == (2, 2, 1000.0)
    assert work.seconds_per_unit == pytest.approx(1 / 100)


def test_an_engine_that_is_being_made_does_not_roll_out_yet() -> None:
    work = work_left(10.0, [engine("r0", 0, 0.0, None)], ("t0",))
    assert work.dedicated == 0


def test_before_a_session_has_finished_the_work_is_unknown() -> None:
    work = work_left(None, [engine("r0", 10, 1.0)], ("t0",))
    assert work.units > 0
    assert work.seconds_per_unit is None


def test_the_bound_is_that_of_the_attempt_and_what_was_measured_stays_in_the_run() -> None:
    worker = WorkerState("t0")
    found = [worker.measure_switches("runs/one", bound) for bound in (10, 20)]
    assert found[0] is found[1]
    assert found[1].gate.max_switches_per_minute == 20
    assert worker.measure_switches("runs/another", 20) is not found[1]


@pytest.fixture
def timeline(empty_run: RunDirectory) -> Timeline:
    return Timeline(empty_run, "t0", "train", "train-1.1")


def test_both_switches_are_timed_where_they_happen(timeline: Timeline) -> None:
    now = [0.0]
    switching = Switching(LendingGate(10), now=lambda: now[0])
    switching.begin_rollout()
    now[0] += 2.0
    switching.note_serving()
    now[0] += 50.0
    switching.note_revoked()
    now[0] += 0.5
    with switching.not_counting():
        now[0] += 180.0  # another rank is late
    now[0] += 0.25
    switching.note_training(timeline)
    assert switching.gate.switch_cost_s == 2.75


def test_a_try_that_others_did_not_join_tells_nothing_of_the_switch(timeline: Timeline) -> None:
    switching = Switching(LendingGate(10))
    switching.gate.note_switch("rollout", 1.0)
    switching.note_revoked()
    with suppress(GangError), switching.not_counting():
        raise GangError("rank 1 (t1) did not come")
    with switching.not_counting():
        pass
    switching.note_training(timeline)
    assert switching.gate.switch_cost_s == 1.0


def test_a_loan_that_was_not_revoked_ends_in_no_switch(timeline: Timeline) -> None:
    now = [0.0]
    switching = Switching(LendingGate(10), now=lambda: now[0])
    switching.note_revoked()
    # training failed, and the loan that follows loses its data plane
    switching.begin_rollout()
    now[0] += 5.0
    switching.note_serving()
    now[0] += 7.0
    switching.note_training(timeline)
    assert switching.gate.switch_cost_s == 5.0


def test_training_that_follows_training_is_no_switch(timeline: Timeline) -> None:
    switching = Switching(LendingGate(10))
    switching.gate.note_switch("rollout", 1.0)
    switching.note_training(timeline)
    assert switching.gate.switch_cost_s == 1.0


def test_a_refused_loan_is_a_wait_of_the_next_train_step(empty_run: RunDirectory, timeline: Timeline) -> None:
    switching = Switching(LendingGate(max_switches_per_minute=0))
    started = time.time()
    with timeline:
        for _ in range(2):
            switching.decide(WorkLeft(1.0, None, dedicated=1, lent=1))
        switching.note_training(timeline)
        switching.note_training(timeline)
    spans = read_spans(empty_run)
    assert [span.label for span in spans if span.kind == "wait"] == ["training, not lent: bound"] * 2
    found = device_figures(spans, (started, time.time()))
    assert (found.not_lent["bound"], found.not_lent["cost"]) == (2, 0)


def test_the_first_start_of_an_engine_is_no_switch_and_one_that_is_interrupted_took_that_long() -> None:
    now = [0.0]
    switching = Switching(LendingGate(10), now=lambda: now[0])
    switching.begin_rollout(is_first_start=True)
    now[0] += 60.0
    switching.note_serving()
    assert switching.gate.switch_cost_s is None
    switching.begin_rollout()
    now[0] += 3.0
    switching.note_revoked()
    assert switching.gate.switch_cost_s == 3.0
