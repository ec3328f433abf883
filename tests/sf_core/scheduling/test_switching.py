from __future__ import annotations

import pytest

from sf_core.engines.emulated import EmulatedEngine
from sf_core.scheduling.lending import LendingGate
from sf_core.scheduling.switching import Switching, work_left
from sf_core.types import WeightsRef


def engine(worker: str, tokens: int, seconds: float, version: int | None = 0) -> dict[str, object]:
    return {"worker": worker, "tokens": tokens, "seconds": seconds, "version": version}


def test_the_work_left_is_timed_by_the_engines_that_are_not_lent() -> None:
    status = {
        "tokens_left": 1000.0,
        "engines": [engine("r0", 500, 10.0), engine("r1", 300, 6.0), engine("t0", 900, 1.0)],
    }
    work = work_left(status, trainers=("t0", "t1"))
    assert (work.dedicated, work.lent, work.units) == (2, 2, 1000.0)
    assert work.seconds_per_unit == pytest.approx(1 / 100)


def test_an_engine_that_is_being_made_does_not_roll_out_yet() -> None:
    work = work_left({"tokens_left": 10.0, "engines": [engine("r0", 0, 0.0, None)]}, ("t0",))
    assert work.dedicated == 0


def test_before_a_session_has_finished_the_work_is_unknown() -> None:
    work = work_left({"tokens_left": None, "engines": [engine("r0", 10, 1.0)]}, ("t0",))
    assert work.units > 0
    assert work.seconds_per_unit is None


def test_both_switches_are_timed_where_they_happen() -> None:
    now = [0.0]
    switching = Switching(LendingGate(10), now=lambda: now[0])

    def make(weights: WeightsRef) -> EmulatedEngine:
        now[0] += 2.0
        return EmulatedEngine(0.0, version=weights.version)

    switching.measured(make)(WeightsRef(3, "unused"))
    now[0] += 50.0
    switching.note_lease_over()
    now[0] += 0.5
    switching.note_training()
    assert switching.gate.switch_cost_s == 2.5


def test_training_that_follows_training_is_no_switch() -> None:
    switching = Switching(LendingGate(10))
    switching.gate.note_to_rollout(1.0)
    switching.note_training()
    assert switching.gate.switch_cost_s is None
