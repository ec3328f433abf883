from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sf_core.scheduling.lending import MINUTE_S, PATIENCE, LendingGate, WorkLeft

UNITS = st.floats(0, 1e6)
SECONDS = st.floats(0, 1e3)
DEVICES = st.integers(1, 64)


def gate(to_rollout: float = 1.0, to_train: float = 1.0, bound: int = 1000) -> LendingGate:
    made = LendingGate(bound)
    made.note_switch("rollout", to_rollout)
    made.note_switch("train", to_train)
    return made


def lends(made: LendingGate, units: float, seconds_per_unit: float | None = 1.0, devices: int = 4) -> bool:
    return made.decide(0.0, WorkLeft(units, seconds_per_unit, dedicated=devices, lent=4)).lend


def test_it_lends_exactly_when_the_time_won_exceeds_the_switches() -> None:
    # 4 of 8 devices are dedicated: lending halves the time that is left
    assert not lends(gate(1.0, 2.0), 6.0)
    assert lends(gate(1.0, 2.0), 6.1)


def test_what_is_unknown_is_lent() -> None:
    assert lends(LendingGate(1000), 1.0)
    assert lends(gate(100.0, 100.0), 1.0, seconds_per_unit=None)


def test_without_dedicated_devices_there_is_no_choice() -> None:
    assert gate(100.0, 100.0, bound=0).decide(0.0, WorkLeft(0, None, dedicated=0, lent=2)).lend


def test_only_the_last_switches_count() -> None:
    made = gate(1000.0, 1000.0)
    for _ in range(3):
        made.note_switch("rollout", 1.0)
        made.note_switch("train", 1.0)
    assert made.switch_cost_s == 2.0


def test_one_dear_switch_forbids_loans_for_a_while_only() -> None:
    made = gate(1.0, 100.0)
    refused = [not lends(made, 10.0) for _ in range(PATIENCE + 1)]
    assert refused == [True] * PATIENCE + [False]
    # what that loan measures counts alone
    made.note_switch("rollout", 1.0)
    made.note_switch("train", 1.0)
    assert lends(made, 10.0)


def test_other_refusals_are_no_reason_to_measure_again() -> None:
    made = gate(1.0, 100.0)
    for _ in range(2 * PATIENCE):
        assert not lends(made, 0.0)
    assert made.switch_cost_s == 101.0


@given(SECONDS, SECONDS, st.none() | SECONDS, DEVICES)
def test_it_never_lends_when_nothing_is_left(
    to_rollout: float, to_train: float, seconds: float | None, devices: int
) -> None:
    assert not lends(gate(to_rollout, to_train), 0.0, seconds, devices)


@given(UNITS, UNITS, SECONDS, SECONDS, DEVICES)
def test_more_work_left_never_turns_a_loan_down(
    one: float, other: float, cost: float, seconds: float, devices: int
) -> None:
    less, more = sorted((one, other))
    assert lends(gate(cost), less, seconds, devices) <= lends(gate(cost), more, seconds, devices)


@given(UNITS, SECONDS, SECONDS, SECONDS, DEVICES)
def test_dearer_switches_never_bring_a_loan_about(
    units: float, one: float, other: float, seconds: float, devices: int
) -> None:
    cheap, dear = sorted((one, other))
    assert lends(gate(dear), units, seconds, devices) <= lends(gate(cheap), units, seconds, devices)


@given(
    st.integers(0, 12),
    st.lists(st.tuples(st.floats(0, 20), UNITS, st.none() | SECONDS, DEVICES), max_size=60),
)
def test_no_minute_sees_more_switches_than_the_bound(
    bound: int, questions: list[tuple[float, float, float | None, int]]
) -> None:
    made = gate(0.0, 0.0, bound)
    now = 0.0
    loans = []
    for later, units, seconds, devices in questions:
        now += later
        if made.decide(now, WorkLeft(units, seconds, devices, lent=4)).lend:
            loans.append(now)
    for start in loans:
        assert 2 * sum(start <= loan < start + MINUTE_S for loan in loans) <= bound
