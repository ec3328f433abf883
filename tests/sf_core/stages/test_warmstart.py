from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sf_core.config import RunConfig
from sf_core.config.yaml_file import load_config
from sf_core.stages.warmstart import MOST_STEPS, configure_warmstart

CONFIGS = sorted(Path("configs").glob("*.yaml"))


def warmed(config: RunConfig, steps: int, rate: float | None = None) -> RunConfig:
    policy = {"model": "m", "warmstart": {"steps": steps, "batch_size": 4, "learning_rate": rate}}
    data = config.model_dump(mode="json") | {"policy": policy, "run_id": "r"}
    return RunConfig.model_validate(data)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_warm_start_of_any_run_has_valid_settings(path: Path) -> None:
    config = warmed(load_config(path), 12)
    nested = configure_warmstart(config, 135_000_000)
    assert RunConfig.model_validate(nested.model_dump(mode="json")) == nested
    assert nested.run_dir == f"{config.run_dir}/warmstart" or not config.run_dir.startswith("/")


@given(st.integers(1, 500))
def test_iterations_of_at_most_ten_steps_make_up_all_steps(steps: int) -> None:
    train = configure_warmstart(warmed(RunConfig(), steps), None).train
    assert train.iterations * train.minibatches == steps and train.minibatches <= MOST_STEPS


def test_the_learning_rate_is_five_times_that_of_the_run_unless_it_is_named() -> None:
    config = warmed(RunConfig(), 2)
    assert configure_warmstart(config, 135_000_000).train.learning_rate == pytest.approx(1e-4)
    named = config.model_copy(update={"train": config.train.model_copy(update={"learning_rate": 1e-5})})
    assert configure_warmstart(named, 135_000_000).train.learning_rate == pytest.approx(5e-5)
    assert configure_warmstart(warmed(RunConfig(), 2, rate=1e-3), 1).train.learning_rate == 1e-3
