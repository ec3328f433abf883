from __future__ import annotations

import math

import pytest

from sf_core.config import RunConfig
from sf_core.stages.train import check_engines


def compared(difference: float, tokens: int = 1000) -> dict[str, float]:
    return {"engine_difference_mean": difference, "engine_difference_tokens": tokens}


@pytest.mark.parametrize("difference", [0.0, 0.09, math.nan])
def test_engines_that_agree_with_the_trainer_pass(difference: float) -> None:
    check_engines(RunConfig(), 3, compared(difference))


def test_engines_that_serve_other_weights_end_the_step() -> None:
    reason = (
        r"^engines and trainer disagree on version 3: the log-probs of its tokens differ by 4\.3 on average, "
        r"but train\.max_engine_difference is 0\.1; check that engines use the weights, dtype and images"
    )
    with pytest.raises(ValueError, match=reason):
        check_engines(RunConfig(), 3, compared(4.3))


def test_log_probs_that_no_policy_gave_are_not_compared() -> None:
    scripted = {"kind": "scripted", "script": "tests.bench.stacks.echo_package:script"}
    check_engines(RunConfig.model_validate({"engine": scripted}), 3, compared(4.3))


def test_a_few_tokens_end_no_step() -> None:
    """After an evaluation nearly all of a batch can be of the version before: one token says nothing."""
    check_engines(RunConfig(), 3, compared(4.3, tokens=1))


def test_engines_that_served_other_weights_before_end_the_step_too() -> None:
    metrics = compared(math.nan, tokens=0)
    metrics |= {name.replace("engine", "lagged"): value for name, value in compared(4.3).items()}
    with pytest.raises(ValueError, match=r"disagree on version 2: the log-probs of its tokens differ by 4"):
        check_engines(RunConfig(), 3, metrics | {"lagged_difference_version": 2.0})
