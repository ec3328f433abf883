import pytest
from hypothesis import given
from hypothesis import strategies as st

from sf_core.scheduling.figures import Switch, Window, device_figures, find_switches, idle_by_cause
from sf_core.scheduling.timeline import Kind, Span, idle_fraction
from tests.bench.reports.spans import R0, T0


def test_a_switch_to_training_costs_from_the_revoke_to_the_first_work() -> None:
    assert find_switches(T0)[0] == Switch("t0", "train", 5, pytest.approx(1.5))


def test_a_switch_to_rollout_costs_from_the_end_of_training_to_the_first_token() -> None:
    assert find_switches(T0)[1] == Switch("t0", "rollout", 9.2, pytest.approx(2.5))


def test_a_lease_that_samples_nothing_is_a_switch_without_a_cost() -> None:
    assert find_switches(T0[:9])[1].seconds is None


def test_what_training_took_over_from_a_lease_that_was_lost_is_a_switch_without_a_cost() -> None:
    killed = [span for span in T0 if span.label != "yield"]
    assert find_switches(killed)[0] == Switch("t0", "train", 5, None)
    assert device_figures(killed, (0, 10)).costs_s("train") == []


def test_figures_are_shares_of_the_window() -> None:
    figures = device_figures([*R0, *T0], (0, 10))
    assert figures.idle == {"r0": 0.0, "t0": pytest.approx(0.35)}
    assert figures.utilisation_train == pytest.approx(0.25)
    assert figures.utilisation_rollout == pytest.approx((10 + 4) / 20)
    assert figures.utilisation_cluster == pytest.approx(1 - 0.35 / 2)
    assert [switch.to for switch in figures.switches] == ["train", "rollout"]
    assert (figures.costs_s("train"), figures.costs_s("rollout")) == (
        [pytest.approx(1.5)],
        [pytest.approx(2.5)],
    )


def test_tokens_count_by_the_role_of_the_worker_and_only_as_far_as_they_lie_in_the_window() -> None:
    figures = device_figures([*R0, *T0], (2, 10))
    assert (figures.tokens_rollout_only, figures.tokens_lent) == (800, 200)


def test_switches_and_devices_of_other_windows_do_not_count() -> None:
    figures = device_figures([*T0, Span("r9", "rollout", 0, 1, "held")], (11, 20))
    assert figures.switches == []
    assert list(figures.idle) == ["t0"]
    assert figures.utilisation_train == 0.0


def test_idle_time_is_divided_by_the_first_cause_that_applies() -> None:
    waits = Span("t0", "rollout", 12.5, 20, "wait", "requests", 1, "t0-1")
    shares = idle_by_cause([*T0, waits], [(0, 5), (5, 10), (10, 20)], [(17, 19)])
    assert shares == {
        "start": 0.05,  # from 4 to 5
        "evaluation": 0.1,
        "loading": 0.065,  # 0.5 s the trainer, 0.8 s the engine
        "requests": 0.275,
        "hand-over": 0.06,  # from 8 to 9.2, saving and held by none
    }


@given(
    bars=st.lists(
        st.tuples(
            st.integers(0, 90),
            st.integers(1, 10),
            st.sampled_from(["busy", "moving", "wait", "held"]),
            st.sampled_from(["load engine", "save"]),
        )
    ),
    evaluations=st.lists(st.tuples(st.integers(0, 50), st.integers(50, 100))),
)
def test_the_causes_of_idle_time_add_up(
    bars: list[tuple[int, int, Kind, str]], evaluations: list[Window]
) -> None:
    spans = [Span("t0", "rollout", start, start + n, kind, label) for start, n, kind, label in bars]
    shares = idle_by_cause(spans, [(0, 40), (40, 60), (80, 100)], evaluations)
    idle = 60 * idle_fraction(spans, (0, 60)) + 20 * idle_fraction(spans, (80, 100))
    assert sum(shares.values()) == pytest.approx(idle / 80, abs=5e-4)
    assert min(shares.values()) >= 0
