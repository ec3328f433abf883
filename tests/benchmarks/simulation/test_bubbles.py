from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulation.bubbles import Work, expected_bubble, measured_work
from sf_core.scheduling.plan import Plan
from tests.benchmarks.simulation.measured import leave_run

seconds = st.floats(0.01, 1e4)
works = st.builds(Work, seconds, seconds)
sizes = st.integers(1, 8)


def plan(rollout: int, trainers: int, lent: bool) -> Plan:
    names = tuple(f"d{i}" for i in range(rollout + trainers))
    return Plan(rollout=names[:rollout], trainers=names[rollout:], lent=lent, agent=())


def test_colocated_devices_idle_for_nothing() -> None:
    assert expected_bubble(plan(0, 2, lent=True), False, Work(rollout=6.0, train=2.0)) == 0.0


def test_sides_that_wait_for_each_other_idle_for_each_others_time() -> None:
    # 3 s of rollout on one, then 1 s of training on the other
    assert expected_bubble(plan(1, 1, lent=False), False, Work(rollout=3.0, train=1.0)) == 0.5


def test_with_overlap_only_the_shorter_side_idles() -> None:
    assert expected_bubble(plan(1, 1, lent=False), True, Work(rollout=3.0, train=1.0)) == 0.333


def test_a_lent_trainer_fills_its_time_unless_training_is_the_longer_part() -> None:
    assert expected_bubble(plan(1, 1, lent=True), True, Work(rollout=3.0, train=1.0)) == 0.0
    # 4 s of training on one device, in which the other has 1 s to do
    assert expected_bubble(plan(1, 1, lent=True), True, Work(rollout=1.0, train=4.0)) == 0.375


@given(sizes, sizes, st.booleans(), st.booleans(), works)
def test_the_expected_bubble_is_a_share(a: int, b: int, lent: bool, overlap: bool, work: Work) -> None:
    assert 0.0 <= expected_bubble(plan(a, b, lent), overlap, work) <= 1.0


@given(sizes, sizes, st.booleans(), works)
def test_lending_and_overlap_never_add_to_it(a: int, b: int, flag: bool, work: Work) -> None:
    assert expected_bubble(plan(a, b, True), flag, work) <= expected_bubble(plan(a, b, False), flag, work)
    assert expected_bubble(plan(a, b, flag), True, work) <= expected_bubble(plan(a, b, flag), False, work)


def test_the_work_of_an_iteration_is_read_from_a_run_that_has_trained(tmp_path: Path) -> None:
    leave_run(str(tmp_path / "done"), iterations=2, rollout=6.0, train=1.5)
    assert measured_work(str(tmp_path / "done")) == Work(rollout=6.0, train=1.5)


def test_a_run_that_has_not_trained_is_named_and_so_is_one_that_is_not_there(tmp_path: Path) -> None:
    leave_run(str(tmp_path / "begun"), iterations=0, rollout=6.0, train=1.5)
    with pytest.raises(ValueError, match="begun: no iteration was trained"):
        measured_work(str(tmp_path / "begun"))
    with pytest.raises(ValueError, match=r"begum: no run here .*did you mean begun"):
        measured_work(str(tmp_path / "begum"))
