"""Idle time by cause: it is all of the idle time, and what is made worse shows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.simulation.idle import causes_of_engines
from benchmarks.simulation.variants import VARIANTS, Devices, Tools, figures_of, simulate_variant
from tests.benchmarks.simulation.small_fleets import LENGTHS, NOTHING, config

TOOLS = Tools(turn=50, result=10, median_s=0.5, sigma=1.0)


def largest_cause(name: str, lengths: Any = LENGTHS, **sections: Any) -> str:
    run = simulate_variant(config(**sections), VARIANTS[name], Devices(2, 2), lengths, overheads=NOTHING)
    return next(iter(figures_of(run).idle_by_cause))


@pytest.mark.parametrize("name", VARIANTS)
def test_the_causes_add_up_to_what_is_idle(name: str) -> None:
    slow = {"write_bandwidth": 1e9, "verify_bandwidth": 2e9, "to_train_s": 0.5, "parameters": 1e9}
    several = replace(LENGTHS, tools=TOOLS)
    found = figures_of(simulate_variant(config(emulation=slow), VARIANTS[name], Devices(2, 2), several))
    assert sum(found.idle_by_cause.values()) == pytest.approx(found.idle_fraction, abs=1e-3)


def test_what_takes_long_is_named_as_the_cause() -> None:
    assert largest_cause("colocated", emulation={"write_bandwidth": 1e8}) == "weights"
    assert largest_cause("colocated", replace(LENGTHS, tools=replace(TOOLS, median_s=20.0))) == "tools"
    assert largest_cause("colocated_drained", rollout={"groups_per_batch": 4}) == "tail"
    # training takes next to nothing, then nearly all the time
    assert largest_cause("async", emulation={"peak_flops": 1e17}) == "batch"
    assert largest_cause("disaggregated", emulation={"peak_flops": 1e13}) == "lag bound"


def test_an_engine_waits_for_one_thing() -> None:
    assert causes_of_engines(3, num_in_tools=2, is_sampling=True) == {"tools": 2, "tail": 1}
    assert causes_of_engines(3, num_in_tools=5, is_sampling=True) == {"tools": 3}
    assert causes_of_engines(3, num_in_tools=0, is_sampling=True) == {"tail": 3}
    assert causes_of_engines(3, num_in_tools=0, is_sampling=False) == {"lag bound": 3}
