"""Settings that are left open: what they are derived from, where they are stored, and what overrides them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sf_core.config import RunConfig, TrainConfig
from sf_core.config.train_config import LARGEST_RATE, SMALLEST_RATE, rate_for, rate_of_built_in
from sf_core.config.validation import validate_config
from sf_core.config.yaml_file import load_config
from sf_core.dataplane.chat.renderer import open_renderer
from sf_core.environments.registry import tasks_of
from sf_core.models import projections
from sf_core.models.adapter import Adapter
from sf_core.settings import Settings
from sf_core.stages.preflight.lora import TrainedAdapter
from sf_core.stages.preflight.resolve import NUM_PROMPTS, first_prompts, resolve, values_of
from sf_core.stages.preflight.sizes import PolicySizes, explain_sizes, warn_of_rates
from sf_core.stages.preflight.stored_config import read_stored_config, resolve_config
from sf_core.stages.run import OpenRun, RunRef
from sf_core.stages.start import start
from sf_core.training.warmstart import learning_rate
from sf_core.types import Task
from storage.run_directory import RunDirectory

SIZES = st.integers(1, 10**12)
OPEN = {"rollout.max_tokens", "engine.context_length", "policy.dtype", "train.learning_rate"}
QUICKSTART = {"rollout.max_tokens": 24, "engine.context_length": 512, "policy.dtype": "float32"}


def explained(config: RunConfig) -> dict[str, str]:
    return explain_sizes(config, PolicySizes.of(config))


def configured(folder: Path, model: str, **sections: Any) -> RunConfig:
    place = {"run_id": "r", "storage": {"root": str(folder)}, "policy": {"model": model}}
    return validate_config(place | sections)


def begun(config: RunConfig, *, is_fast: bool, monkeypatch: pytest.MonkeyPatch) -> OpenRun:
    """A run with these settings whose version 0 a worker of this kind has made."""
    monkeypatch.setattr(projections, "has_fast_products", lambda dtype, device: is_fast)
    config = resolve_config(config)
    RunDirectory(config.run_dir).write_config(config)
    ref = RunRef("r", config.run_dir, dataplane_url="", attempt=1)
    start(ref, prompts=first_prompts(config))
    return OpenRun(ref)


@given(SIZES, SIZES)
def test_a_larger_policy_never_learns_faster_and_all_within_bounds(one: int, other: int) -> None:
    smaller, larger = sorted((one, other))
    assert LARGEST_RATE >= rate_for(smaller) >= rate_for(larger) >= SMALLEST_RATE


@given(st.integers(600_000, 54_000_000_000))
def test_the_rate_is_that_of_135_million_parameters_by_the_root_of_the_size(parameters: int) -> None:
    exact = 2e-5 * (135e6 / parameters) ** 0.5
    assert rate_for(parameters) == pytest.approx(exact, rel=0.06)


def test_a_model_gets_defaults_of_its_own_and_the_run_stores_them(
    tmp_path: Path, small_policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(tmp_path, small_policy)
    run = begun(config, is_fast=True, monkeypatch=monkeypatch)
    tasks = tasks_of(config.environment)
    renderer = open_renderer(small_policy)
    prompts = [[{"role": "user", "content": tasks("train", i).prompt}] for i in range(NUM_PROMPTS)]
    longest = max(len(renderer.encode(renderer.render(prompt, []))) for prompt in prompts)
    found = run.config
    assert found.rollout.max_tokens == 256
    assert found.engine.context_length == longest + 4 * 256
    assert found.policy.dtype == "bfloat16"
    assert found.train.learning_rate == LARGEST_RATE
    assert (
        json.loads(Path(run.directory.start_dir, "config.json").read_text(encoding="utf-8"))["dtype"]
        == "bfloat16"
    )
    assert run.directory.read_config(RunConfig).rollout.max_tokens == 256


def test_a_run_that_resumes_on_other_hardware_keeps_what_was_derived(
    tmp_path: Path, small_policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(tmp_path, small_policy)
    before = begun(config, is_fast=True, monkeypatch=monkeypatch).config
    lines: list[str] = []
    monkeypatch.setattr(projections, "has_fast_products", lambda dtype, device: False)
    form = validate_config(config.model_dump(mode="json"))
    auto = configured(tmp_path, small_policy, policy={"model": small_policy, "dtype": "auto"})
    for asked in (config, form, auto, read_stored_config(config.run_dir)):
        resumed = resolve_config(asked, lines.append)
        RunDirectory(config.run_dir).write_config(resumed)
        ref = RunRef("r", config.run_dir, dataplane_url="", attempt=2)
        start(ref, prompts=["much longer " * 100])
        assert (resumed, OpenRun(ref).config) == (before, before)
    assert lines == []


def test_what_the_user_names_counts_also_on_a_resume(
    tmp_path: Path, small_policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = {
        "rollout": {"max_tokens": 64},
        "engine": {"context_length": 300},
        "train": {"learning_rate": 1e-4, "checkpoint_every": 3},
    }
    policy = {"model": small_policy, "dtype": "float32"}
    config = configured(tmp_path, small_policy, policy=policy, **named)
    run = begun(config, is_fast=True, monkeypatch=monkeypatch)
    assert run.config == config
    start_manifest = run.directory.read_manifest(None, "start")
    assert start_manifest is not None and "derived" not in start_manifest.data
    # a file that leaves open what the run has
    assert resolve_config(configured(tmp_path, small_policy)) == config
    lines: list[str] = []
    changed = resolve_config(configured(tmp_path, small_policy, rollout={"max_tokens": 80}), lines.append)
    assert changed.rollout.max_tokens == 80
    assert lines == ["run r: uses its stored configuration, except for rollout.max_tokens 80 (was 64)"]


def test_a_change_that_does_not_fit_into_the_derived_context_is_refused(
    tmp_path: Path, small_policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(configured(tmp_path, small_policy), is_fast=False, monkeypatch=monkeypatch)
    with pytest.raises(
        ValueError, match=r"rollout\.max_tokens \(2000\) must be less than engine\.context_le"
    ):
        resolve_config(configured(tmp_path, small_policy, rollout={"max_tokens": 2000}))


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        # half of a context that the user names
        ({"engine": {"context_length": 160}}, {"rollout.max_tokens": 80}),
        ({"rollout": {"max_tokens": 100}}, {"engine.context_length": 103 + 400}),
        # at most the 2,048 positions of the model
        ({"rollout": {"max_tokens": 1000}}, {"engine.context_length": 2048}),
        # nothing to measure
        ({"environment": {"agent": {"command": ["claude"]}}}, {"engine.context_length": 2048}),
        ({"rollout": {"outside_groups": 32}}, {"engine.context_length": 2048}),
    ],
)
def test_lengths_follow_from_those_that_are_named(
    tmp_path: Path, small_policy: str, sections: dict[str, Any], expected: dict[str, Any]
) -> None:
    config = configured(tmp_path, small_policy, **sections)
    renderer = open_renderer(small_policy)
    prompt = "x"
    while len(renderer.encode(renderer.render([{"role": "user", "content": prompt}], []))) < 103:
        prompt += "x"
    known = [prompt] if first_prompts(config) else []
    found = values_of(resolve(config, 20_000, small_policy, known))
    assert {key: found[key] for key in expected} == expected


def test_an_answer_longer_than_the_model_is_for_is_refused(tmp_path: Path, small_policy: str) -> None:
    config = configured(tmp_path, small_policy, rollout={"max_tokens": 2048})
    with pytest.raises(ValueError, match=r"rollout\.max_tokens \(2048\) must be less than the 2048 tokens"):
        resolve(config, 20_000, small_policy)


def few(split: str, index: int) -> Task:
    if index == 3:
        raise IndexError(index)
    return Task(f"few-{split}-{index}", "few", f"prompt {index}")


def test_fewer_prompts_than_are_wanted_are_measured_as_well(tmp_path: Path, small_policy: str) -> None:
    config = configured(tmp_path, small_policy, environment={"tasks": f"{__name__}:few"})
    assert first_prompts(config) == ["prompt 0", "prompt 1", "prompt 2"]
    assert first_prompts(config.fill({"engine.context_length": 512})) == []
    assert first_prompts(RunConfig()) == []


def test_the_quickstart_stores_what_it_always_stored(tmp_path: Path) -> None:
    config = resolve_config(load_config("quickstart", ["run_id=r", f"storage.root={tmp_path}"]))
    assert {key: value for key, value in flat(config).items() if key in QUICKSTART} == QUICKSTART
    assert config.train.learning_rate is None
    [(name, rate)] = resolve(config, 983_040).items()
    assert (name, *rate) == ("train.learning_rate", 1e-3, "the built-in policy, 983,040 parameters")


def test_the_defaults_of_the_built_in_policy_are_what_the_quickstart_once_named() -> None:
    config = load_config("quickstart")
    warm = config.policy.warmstart
    assert warm is not None
    assert (config.policy.warm_steps, warm.batch_size, config.train.rate) == (250, 32, 1e-3)
    assert learning_rate(warm, config.policy.warm_steps, 12) == pytest.approx(5e-3)


def flat(settings: Settings, within: str = "") -> dict[str, Any]:
    values = {f"{within}{name}": getattr(settings, name) for name in type(settings).model_fields}
    for key, value in list(values.items()):
        if isinstance(value, Settings):
            values |= flat(value, f"{key}.")
    return values


def test_a_plan_says_of_a_large_built_in_policy_what_its_run_stores() -> None:
    config = RunConfig.model_validate({"policy": {"hidden_size": 1024, "num_layers": 12}})
    sizes = PolicySizes.of(config)
    assert sizes is not None and sizes.weights > 4 * 83_000_000
    assert sizes.config.train.interval == config.fill(values_of(resolve(config))).train.interval == 1
    assert "a checkpoint, each iteration" in explained(config)["storage"]


def test_each_derived_setting_is_said_with_its_reason(
    tmp_path: Path, small_policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(projections, "has_fast_products", lambda dtype, device: False)
    said = explained(configured(tmp_path, small_policy))
    assert said["rollout.max_tokens"] == "256: policy.model is set"
    assert said["train.learning_rate"].endswith(" parameters, 2e-5 x sqrt(135M / N)")
    assert "the longest of the first 64 prompts has" in said["engine.context_length"]
    assert said["policy.dtype"] == "float32: the CPU has no instructions for bfloat16"
    # the built-in policy has one that is derived
    assert OPEN & explained(RunConfig()).keys() == {"train.learning_rate"}
    elsewhere = explained(configured(tmp_path, "/only/on/a/worker"))
    assert elsewhere == {"rollout.max_tokens": "256: policy.model is set"}


@given(SIZES, SIZES)
def test_a_larger_built_in_policy_never_learns_faster_and_its_adapter_three_times_as_fast(
    one: int, other: int
) -> None:
    smaller, larger = sorted((one, other))
    assert 1e-3 >= rate_of_built_in(smaller) >= rate_of_built_in(larger) > 0
    assert rate_of_built_in(one, is_adapter=True) == pytest.approx(3 * rate_of_built_in(one), rel=0.06)


@given(st.integers(1, 10**12))
def test_an_adapter_takes_ten_times_the_rate_within_the_same_bounds(parameters: int) -> None:
    rate = rate_for(parameters)
    assert SMALLEST_RATE <= rate <= LARGEST_RATE
    assert rate_for(parameters, is_adapter=True) == pytest.approx(10 * rate)


def test_the_rate_of_an_adapter_is_that_of_its_policy_and_its_checkpoints_are_as_often_as_small() -> None:
    adapter = TrainedAdapter(Adapter(2, 4.0, ("q_proj",)), {"a": (2, 1000), "b": (3000, 2)}, None)
    config = RunConfig.model_validate({"policy": {"model": "/m", "dtype": "float32"}, "train": {"lora": {}}})
    found = resolve(config, 8_000_000_000, adapter=adapter)
    rate = found["train.learning_rate"]
    every = found["train.checkpoint_every"]
    assert rate.value == pytest.approx(10 * rate_for(8_000_000_000))
    assert rate.reason.startswith("10 times that of training all weights (8,000,000,000 parameters, 2e-5 x ")
    assert every == (1, "8,000 parameters that are trained of 12 bytes in a checkpoint")
    assert (found["train.lora.rank"].value, found["train.lora.alpha"].value) == (2, 4.0)
    assert TrainConfig().rate == 1e-3
    assert RunConfig.model_validate({"train": {"lora": {}}}).train.rate == pytest.approx(3e-3)


def warned(config: RunConfig, parameters: int) -> list[str]:
    """What is said of the rates if the policy has this size."""
    sizes = PolicySizes.of(RunConfig())
    assert sizes is not None
    return warn_of_rates(config, replace(sizes, parameters=parameters))


RUINS = "and may ruin the policy: leave {0} out, or lower it"


@pytest.mark.parametrize(
    ("sections", "parameters", "expected"),
    [
        ({"policy": {"model": "/m"}}, 135_000_000, []),
        ({"policy": {"model": "/m"}, "train": {"learning_rate": 2e-4}}, 135_000_000, []),
        ({"train": {"learning_rate": 0.01}}, 1_000_000, []),
        ({"train": {"learning_rate": 0.03, "lora": {}}}, 1_000_000, []),
        (
            {"policy": {"model": "/m"}, "train": {"learning_rate": 0.001}},
            135_000_000,
            [
                "train.learning_rate 0.001 is 50 times the value that would be derived, 2e-05 (135,000,000 "
                "parameters, 2e-5 x sqrt(135M / N)), " + RUINS.format("train.learning_rate")
            ],
        ),
        (
            {"policy": {"model": "/m", "warmstart": {"steps": 3, "learning_rate": 0.0015}}},
            135_000_000,
            [
                "policy.warmstart.learning_rate 0.0015 is 15 times the value that would be derived, 0.0001 "
                "(135,000,000 parameters, 2e-5 x sqrt(135M / N)), "
                + RUINS.format("policy.warmstart.learning_rate")
            ],
        ),
        ({"policy": {"model": "/m", "warmstart": {"learning_rate": 0.0015}}}, 135_000_000, []),
    ],
)
def test_a_rate_of_more_than_ten_derived_ones_is_warned_of(
    sections: dict[str, Any], parameters: int, expected: list[str]
) -> None:
    config = RunConfig.model_validate(sections)
    assert warned(config, parameters) == expected
    assert warn_of_rates(config, None) == []


@given(st.floats(1e-7, 1.0), SIZES, st.booleans(), st.booleans())
def test_warned_is_exactly_of_what_is_above_ten_derived_rates(
    given_rate: float, parameters: int, is_built_in: bool, is_adapter: bool
) -> None:
    sections: dict[str, Any] = {"train": {"learning_rate": given_rate}}
    sections["policy"] = {} if is_built_in else {"model": "/m"}
    if is_adapter:
        sections["train"]["lora"] = {}
    config = RunConfig.model_validate(sections)
    own = (rate_of_built_in if is_built_in else rate_for)(parameters, is_adapter=is_adapter)
    assert bool(warned(config, parameters)) == (given_rate > 10 * own)
    assert not warned(config.put(["train", "learning_rate"], None), parameters)
