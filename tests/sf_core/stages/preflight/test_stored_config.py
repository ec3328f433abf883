"""Resuming a run: which of the caller's settings count, and what is logged about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sf_core.config import RunConfig
from sf_core.config.removed import drop_removed
from sf_core.config.rollout_config import JudgeConfig
from sf_core.config.validation import validate_config
from sf_core.recipes.losses import Cispo
from sf_core.reports.iterations import failures_of
from sf_core.stages.preflight.stored_config import (
    has_started,
    read_stored_config,
    resolve_config,
    resolve_for_evaluation,
)
from sf_core.stages.run import OpenRun, RunRef
from sf_core.training.stored_steps import read_stored_settings
from storage.run_directory import Attempt, RunDirectory
from tests.bench.runs import commit, pretend

KEPT = Path(__file__).parents[3] / "data" / "runs" / "old"

STORED = {
    "seed": 7,
    "policy": {"hidden_size": 64},
    "environment": {"reward": "a:b"},
    "train": {"iterations": 100},
    "cluster": {"workers": {"w": {"tags": ["rollout", "train", "agent", "cpu"]}}},
    "dataplane": {"url": "http://127.0.0.1:8700"},
}


def configured(root: Path, **sections: Any) -> RunConfig:
    return validate_config({"run_id": "r", "storage": {"root": str(root)}} | sections)


@pytest.fixture
def stored(tmp_path: Path) -> RunConfig:
    """Configuration of an existing run."""
    config = configured(tmp_path, **STORED)
    RunDirectory(config.run_dir).write_config(config)
    return config


def said(config: RunConfig) -> tuple[RunConfig, list[str]]:
    lines: list[str] = []
    return resolve_config(config, lines.append), lines


def test_a_run_is_read_back_as_it_was_configured_wherever_it_is_now(
    tmp_path: Path, stored: RunConfig
) -> None:
    assert read_stored_config(stored.run_dir) == stored
    (tmp_path / "after").mkdir()
    Path(stored.run_dir).rename(tmp_path / "after" / "r")
    moved = read_stored_config(str(tmp_path / "after" / "r"))
    assert (moved.run_dir, moved.seed) == (str(tmp_path / "after" / "r"), 7)


def holds(read: dict[str, Any], written: dict[str, Any]) -> bool:
    """Whether every setting that was written has its value; others may have come since."""
    return all(
        holds(read[name], value) if isinstance(value, dict) else read[name] == value
        for name, value in written.items()
    )


def test_what_a_run_of_this_format_has_stored_is_read_as_it_was_meant() -> None:
    run = RunDirectory(str(KEPT))
    written = json.loads((KEPT / "config.json").read_text(encoding="utf-8"))
    config = run.read_config(RunConfig)
    # a gate was a name alone
    written["rollout"]["gate"] = {"kind": written["rollout"]["gate"]}
    assert holds(config.model_dump(mode="json"), drop_removed(written))
    settings = read_stored_settings(OpenRun(RunRef("old", run.uri, dataplane_url="", attempt=0)), 3)
    # its steps were packed by the only rule that there was
    assert settings == config.train.model_copy(update={"packing": "padded"})
    assert run.newest_attempt() == Attempt(dataplane="", host="vm")
    rollout = run.read_manifest(3, "rollout")
    assert rollout is not None and (failures_of(rollout), rollout.data["groups"]) == ({}, [*range(96, 128)])
    assert run.read_summary() == json.loads((KEPT / "summary.json").read_text(encoding="utf-8"))


def test_a_new_run_is_configured_as_the_caller_says(tmp_path: Path) -> None:
    config = configured(tmp_path, **STORED)
    of_built_in = {"rollout.max_tokens": 64, "engine.context_length": 512, "policy.dtype": "float32"}
    of_built_in |= {"train.checkpoint_every": 1}
    assert said(config) == (config.fill(of_built_in), [])


def test_resumed_as_it_was_nothing_changes_and_nothing_is_said(stored: RunConfig) -> None:
    assert said(read_stored_config(stored.run_dir)) == (stored, [])


@pytest.mark.parametrize(
    ("warm", "rate", "derived"),
    [
        # README's agent and the quickstart, as they were at 39a15e0c
        ({"steps": None, "batch_size": 64, "learning_rate": None}, None, {"train.learning_rate": 3e-4}),
        ({"steps": 250, "batch_size": 32, "learning_rate": 0.005}, 0.001, {}),
    ],
)
@pytest.mark.parametrize("has_batch", [False, True])
def test_a_run_keeps_what_were_the_defaults_when_it_began(
    tmp_path: Path, warm: dict[str, Any], rate: float | None, derived: dict[str, float], has_batch: bool
) -> None:
    config = configured(tmp_path, policy={"warmstart": warm}, train={"learning_rate": rate})
    run = RunDirectory(config.run_dir)
    run.write_config(config)
    commit(run, None, "start", data={"parameters": 983_040, "derived": derived})
    if has_batch:
        commit(run, 0, "rollout")
    settled, lines = said(configured(tmp_path))
    assert has_started(configured(tmp_path)) and lines == []
    kept = settled.policy.warmstart
    assert kept is not None and kept.model_dump(include=set(warm)) == warm
    assert settled.train.rate == (rate or 3e-4)


def test_what_the_caller_does_not_set_stays_and_its_addresses_count(
    tmp_path: Path, stored: RunConfig
) -> None:
    settled, lines = said(configured(tmp_path))
    assert settled == stored.model_copy(update={"dataplane": RunConfig().dataplane})
    assert lines == [
        "run r: uses its stored configuration, except for dataplane.url none (was 'http://127.0.0.1:8700')"
    ]


def test_what_the_caller_sets_counts_and_is_said(tmp_path: Path, stored: RunConfig) -> None:
    changes = {"train": {"iterations": 120, "betas": [0.8, 0.9]}, "dataplane": STORED["dataplane"]}
    settled, lines = said(configured(tmp_path, **changes))
    assert (settled.train.iterations, settled.train.betas, settled.seed) == (
        120,
        (0.8, 0.9),
        7,
    )
    assert settled.cluster == stored.cluster
    [line] = lines
    assert line.startswith(
        "run r: uses its stored configuration, except for train.iterations 120 (was 100), train.betas"
    )
    assert said(settled)[0] == settled


def test_a_form_that_sends_every_default_goes_on_with_what_is_stored(
    tmp_path: Path, stored: RunConfig
) -> None:
    form = validate_config(configured(tmp_path).model_dump(mode="json"))
    settled, (changed, kept) = said(form)
    assert settled.model_copy(update={"dataplane": stored.dataplane}) == stored
    assert "dataplane.url none" in changed
    assert kept.startswith(
        "run r: a default does not override a stored setting, so the run keeps seed 7, "
        "policy.hidden_size 64, "
    )
    assert "train.iterations 100" in kept


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"seed": 8}, "seed 7, not 8;"),
        ({"policy": {"hidden_size": 32}}, "policy.hidden_size 64, not 32;"),
        (
            {"policy": {"warmstart": None}},
            "policy.warmstart steps=None batch_size=32",
        ),
        ({"environment": {"reward": "a:c"}}, "environment.reward 'a:b', not 'a:c';"),
    ],
)
def test_a_run_with_a_batch_does_not_go_on_with_another_policy_seed_or_environment(
    tmp_path: Path, stored: RunConfig, change: dict[str, Any], sentence: str
) -> None:
    commit(RunDirectory(stored.run_dir), 0, "rollout")
    with pytest.raises(ValueError) as refused:
        said(configured(tmp_path, **change))
    assert f"run r was started with {sentence}" in str(refused.value)
    assert "choose another run_id, or leave " in str(refused.value)


def test_a_judge_may_move_and_be_asked_otherwise_but_stays_the_same_model(tmp_path: Path) -> None:
    def judged(**changes: Any) -> RunConfig:
        judge = {"url": "http://one:8000/v1", "name": "j"} | changes
        return configured(tmp_path, environment={"judges": {"quality": judge}})

    run = RunDirectory(judged().run_dir)
    run.write_config(judged())
    commit(run, 0, "rollout")
    moved = {"url": "http://two:8000/v1", "timeout_s": 5, "concurrency": 2, "max_tokens_per_iteration": 9000}
    assert said(judged(**moved))[0].environment == judged(**moved).environment
    assert said(configured(tmp_path))[0].environment == judged().environment
    for change in (
        {"name": "k"},
        {"temperature": 0.5},
        {"max_tokens": 1},
        {"url": None, "name": None, "model": "/j"},
    ):
        with pytest.raises(ValueError, match=r"run r was started with environment.judges .*; choose another"):
            said(judged(**change))


def test_a_judge_whose_limits_are_left_open_keeps_those_of_its_run(tmp_path: Path) -> None:
    def judged(**settings: Any) -> RunConfig:
        judge = {"url": "http://one:8000/v1"} | settings
        return configured(tmp_path, environment={"judges": {"quality": judge}})

    run = RunDirectory(judged().run_dir)
    run.write_config(judged(max_tokens=256, timeout_s=60))  # as all runs of before have it
    commit(run, 0, "rollout")
    resumed, lines = said(judged())
    assert resumed.environment.judges["quality"] == JudgeConfig(
        url="http://one:8000/v1", max_tokens=256, timeout_s=60
    )
    assert lines == [], "nothing was changed"
    moved, _ = said(judged(url="http://two:8000/v1", timeout_s=90))
    assert moved.environment.judges["quality"] == JudgeConfig(
        url="http://two:8000/v1", max_tokens=256, timeout_s=90
    )


def test_a_run_without_a_batch_begins_anew_as_the_caller_says(tmp_path: Path, stored: RunConfig) -> None:
    commit(RunDirectory(stored.run_dir), 0, "evaluate")
    asked = configured(tmp_path, environment={"reward": "a:c"}, policy={"hidden_size": 32})
    begun, lines = said(asked)
    # what the caller leaves out is as in a new run too: seed, iterations, workers
    assert begun == said(asked.model_copy(update={"run_id": "new"}))[0].model_copy(update={"run_id": "r"})
    assert lines == [
        "run r has no batch yet and starts over, with policy.hidden_size 32 (was 64), "
        "environment.reward 'a:c' (was 'a:b')"
    ]
    assert said(begun)[0] == begun, "the flow settles it again"
    # other changes make no other run of it
    assert said(configured(tmp_path, train={"iterations": 120}))[0].seed == 7


def test_a_run_has_started_unless_it_begins_anew(tmp_path: Path, stored: RunConfig) -> None:
    other = configured(tmp_path, seed=8)
    assert not has_started(stored) and not has_started(other)
    commit(RunDirectory(stored.run_dir), None, "start")
    assert has_started(stored) and not has_started(other)
    commit(RunDirectory(stored.run_dir), 0, "rollout")
    assert has_started(other), "it is refused where it would go on"


def test_a_run_may_end_earlier_but_not_before_what_is_published(tmp_path: Path, stored: RunConfig) -> None:
    pretend(RunDirectory(stored.run_dir), 3, finished=False)
    assert said(configured(tmp_path, train={"iterations": 3}))[0].train.iterations == 3
    lines: list[str] = []
    with pytest.raises(ValueError) as refused:
        resolve_config(configured(tmp_path, train={"iterations": 2}), lines.append)
    assert str(refused.value) == (
        "run r has already published version 3, so train.iterations cannot be 2; set "
        "train.iterations to at least 3, or leave train.iterations out"
    )
    assert lines == []


def test_settings_that_do_not_fit_those_that_are_stored_are_refused(
    tmp_path: Path, stored: RunConfig
) -> None:
    RunDirectory(stored.run_dir).write_config(configured(tmp_path, rollout={"groups_per_batch": 4}))
    with pytest.raises(ValueError, match=r"^run r: train.minibatches \(8\) must not exceed rollout.groups"):
        said(configured(tmp_path, train={"minibatches": 8}))


def test_a_run_is_measured_as_it_was_configured_over_the_tasks_that_are_asked_for(
    tmp_path: Path, stored: RunConfig
) -> None:
    asked = configured(tmp_path, evaluate={"num_tasks": 1000}, dataplane=STORED["dataplane"])
    measured = resolve_for_evaluation(asked)
    assert measured == stored.model_copy(update={"evaluate": asked.evaluate})
    with pytest.raises(
        ValueError, match=r"run r was configured with train.iterations 100, not 3, and an evaluation must"
    ):
        resolve_for_evaluation(configured(tmp_path, train={"iterations": 3}))
    assert read_stored_config(stored.run_dir) == stored


def test_only_a_run_that_is_there_is_measured(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no run here \(config.json is missing\)"):
        resolve_for_evaluation(configured(tmp_path))


def test_another_formula_is_taken_as_a_whole(tmp_path: Path, stored: RunConfig) -> None:
    changes = {
        "dataplane": STORED["dataplane"],
        "train": {"loss": {"policy": {"kind": "cispo", "high": 0.5}}},
    }
    resumed, [line] = said(configured(tmp_path, **changes))
    assert resumed == stored.model_copy(update={"train": resumed.train})
    assert resumed.train.loss.policy == Cispo(high=0.5)
    assert "except for train.loss.policy kind='cispo' high=0.5 (was kind='clip' low=0.2" in line


def test_a_critic_is_neither_added_nor_taken_away(tmp_path: Path, stored: RunConfig) -> None:
    ppo = {"advantage": "gae", "critic": {}}
    commit(RunDirectory(stored.run_dir), 0, "rollout")
    with pytest.raises(ValueError, match=r"^run r was started with train\.critic none, not learning_rate="):
        resolve_config(configured(tmp_path, train=ppo))
    other = {"run_id": "ppo", "storage": {"root": str(tmp_path)}, "train": ppo}
    config = validate_config(other)
    RunDirectory(config.run_dir).write_config(config)
    changed = validate_config(other | {"train": ppo | {"critic": {"learning_rate": 0.5}}})
    resumed, _ = said(changed)
    assert resumed.train.critic is not None and resumed.train.critic.learning_rate == 0.5
