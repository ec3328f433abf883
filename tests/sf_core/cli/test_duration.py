"""Tests of how long a run is said to take."""

from __future__ import annotations

from typing import Any

import pytest

from sf_core.cli.duration import Estimate, count_seconds, describe
from sf_core.config import RunConfig
from sf_core.stages.preflight.sizes import PolicySizes

FLOPS = 1e11


def sizes_of(**sections: Any) -> PolicySizes:
    sizes = PolicySizes.of(RunConfig.model_validate(sections))
    assert sizes is not None
    return sizes


def test_twice_the_iterations_take_twice_as_long_but_for_the_start() -> None:
    once, twice, three = (
        count_seconds(sizes_of(train={"iterations": n}, evaluate={"every": 1000}), FLOPS)
        for n in (100, 200, 300)
    )
    assert twice - once == pytest.approx(three - twice)
    assert 0 < 2 * once - twice < 60


@pytest.mark.parametrize("flops", [1e9, 1e12])
def test_a_faster_machine_saves_the_time_of_products_alone(flops: float) -> None:
    sizes = sizes_of(policy={"hidden_size": 512, "num_layers": 8})
    forever = count_seconds(sizes, 1e30)
    assert count_seconds(sizes, flops) - forever == pytest.approx(
        2 * (count_seconds(sizes, 2 * flops) - forever), rel=1e-3
    )


def test_longer_answers_and_prompts_of_a_larger_environment_take_longer() -> None:
    short, long = (count_seconds(sizes_of(rollout={"max_tokens": n}), FLOPS) for n in (16, 64))
    assert short < long
    assert count_seconds(sizes_of(evaluate={"every": 1}), FLOPS) > count_seconds(sizes_of(), FLOPS)


def test_the_sentence_names_what_was_assumed() -> None:
    sizes = sizes_of(rollout={"max_tokens": 24}, train={"iterations": 40})
    minutes = count_seconds(sizes, FLOPS) / 60
    assert describe(sizes, FLOPS) == (
        f"about {minutes:,.0f} min for 40 iterations, estimated from matrix products on this machine "
        "(100 GFLOP/s), for one answer of 12 tokens per session"
    )
    assert describe(sizes_of(train={"iterations": 1}), 1e15).startswith("less than a minute for 1 iteration,")


def test_products_of_this_machine_are_measured_where_a_run_computes_on_its_cpus() -> None:
    config = RunConfig()
    told = Estimate(config, PolicySizes.of(config)).describe()
    assert told is not None and "for 40 iterations, estimated from matrix products" in told


@pytest.mark.parametrize(
    "sections",
    [
        {"engine": {"kind": "emulated"}},
        {"cluster": {"scheduler": "tcp://127.0.0.1:8786"}},
        {"cluster": {"workers": {"t0": {"tags": ["rollout", "train"], "device": "cuda:0"}}}},
    ],
)
def test_nothing_is_said_of_a_run_that_computes_elsewhere(sections: dict[str, Any]) -> None:
    config = RunConfig.model_validate(sections)
    assert Estimate(config, PolicySizes.of(config)).describe() is None
