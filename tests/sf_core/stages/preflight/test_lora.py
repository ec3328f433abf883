"""Which adapters a run can train, and what is said of those that it cannot."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from sf_core.config import PolicyConfig, RunConfig
from sf_core.models.adapter import Adapter, make_factors, shape_factors
from sf_core.models.builtin import make_policy
from sf_core.stages.preflight import checks
from sf_core.stages.preflight.checks import preflight
from sf_core.stages.preflight.facts import Facts
from sf_core.stages.preflight.stored_config import resolve_config
from sf_core.stages.run import RunRef
from sf_core.stages.start import start
from storage.run_directory import RunDirectory
from storage.tensors.weights import load_weights, save_adapter
from tests import bench
from tests.bench import commands, refusals

LORA: dict[str, Any] = {"train": {"lora": {}}}
VLLM: dict[str, Any] = {"kind": "vllm"}


def save_tuned(folder: Path, model: str, rank: int = 2, dtype: str | None = None) -> Path:
    """An adapter of the model; alpha 6, of o_proj and q_proj."""
    adapter = Adapter(rank, 6.0, ("o_proj", "q_proj"))
    shapes = shape_factors(adapter, bench.engines.model_folders.linears_of(model))
    save_adapter(str(folder), make_factors(shapes, 1), adapter.encode(model), 0, dtype)
    return folder


@pytest.fixture
def tuned(tmp_path: Path, small_policy: str) -> Path:
    return save_tuned(tmp_path / "tuned", small_policy)


@pytest.mark.parametrize(
    "settings",
    [
        LORA,
        LORA | {"engine": {"kv_on_update": "keep"}},
        LORA | {"pipeline": "colocated"},
        LORA | {"engine": VLLM},
        LORA | {"engine": VLLM, "pipeline": "async"},
        LORA | {"engine": VLLM, "pipeline": "disaggregated"},
        {"train": {"lora": {"rank": 512, "alpha": 0.5, "targets": ["q_proj"]}}},
    ],
)
def test_settings_that_go_with_an_adapter_are_taken(settings: dict[str, Any]) -> None:
    preflight(Facts(RunConfig.model_validate(settings)))


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def spoiled(name: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).write_bytes(b"{")

    return write


def with_factors(
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
) -> Callable[[Path], None]:
    def store(folder: Path) -> None:
        save_file(change(load_weights(str(folder))), folder / "adapter_model.safetensors")

    return store


FACTOR = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"

TUNED = ("policy: {model: model, adapter: tuned}", "train: {lora: {}}")


@refusals.refuses("""
    {"use_dora": true}
    > policy.adapter: tuned/adapter_config.json describes DoRA (use_dora), which SeamlessFlow cannot train
    {"use_rslora": true}
    > policy.adapter: tuned/adapter_config.json describes rank-stabilised scaling (rsLoRA) (use_rslora), which
    > SeamlessFlow cannot train; set use_rslora to false and lora_alpha to 8.48528 for the same result
    {"modules_to_save": ["lm_head"]}
    > policy.adapter: tuned/adapter_config.json describes whole modules in addition to its factors
    > (modules_to_save), which SeamlessFlow cannot train
    {"bias": "lora_only"}
    > policy.adapter: tuned/adapter_config.json says that biases are trained (bias: lora_only); only adapters
    > without biases are supported
    {"lora_dropout": 0.1}
    > policy.adapter: tuned/adapter_config.json describes dropout (lora_dropout), which SeamlessFlow cannot
    > train; set lora_dropout to 0 there to train without dropout
    {"alpha_pattern": {"q_proj": 3}}
    > policy.adapter: tuned/adapter_config.json describes an alpha for each layer (alpha_pattern), which
    > SeamlessFlow cannot train
    {"peft_type": "IA3"}
    > policy.adapter: tuned/adapter_config.json describes an adapter of kind IA3; only LoRA is supported
    {"target_modules": ["lm_head", "q_proj"]}
    > policy.adapter: the target lm_head is not a linear layer of the model's blocks; these layers are
    > down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj
    {"r": 0}
    > policy.adapter: tuned has rank 0; expected 1 to 512
    {"r": 513}
    > policy.adapter: tuned has rank 513; expected 1 to 512
    {"r": 3}
    > policy.adapter: tuned was made for another model than policy.model:
    > 'base_model.model.model.layers.0.self_attn.o_proj.lora_A.weight' has shape [2, 32]; expected [3, 32]
    {"lora_alpha": 0}
    > policy.adapter: tuned has alpha 0, so its factors change nothing
""")
def test_a_description_of_an_adapter_that_cannot_be_continued_is_refused(
    refusal: refusals.Refusal, policy_copy: Path, tuned: Path, tmp_path: Path
) -> None:
    about = tuned / "adapter_config.json"
    changes = json.loads(refusal.given[0])
    about.write_text(json.dumps(json.loads(about.read_text(encoding="utf-8")) | changes), encoding="utf-8")
    replace(refusal, given=TUNED).check(tmp_path)


BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "no configuration": (
        without("adapter_config.json"),
        "tuned does not contain an adapter: adapter_config.json is missing",
    ),
    "no factors": (
        without("adapter_model.safetensors"),
        "tuned does not contain an adapter: adapter_model.safetensors is missing",
    ),
    "no JSON": (
        spoiled("adapter_config.json"),
        "tuned/adapter_config.json cannot be read: Expecting property name enclosed in double quotes: line 1 "
        "column 2 (char 1)",
    ),
    "cut off": (
        spoiled("adapter_model.safetensors"),
        "tuned/adapter_model.safetensors: not a complete safetensors file: the header is cut off",
    ),
    "codes": (
        with_factors(lambda factors: {name: t.to(torch.int8) for name, t in factors.items()}),
        "tuned has quantised factors (I8); training needs unquantised factors",
    ),
    "fewer layers": (
        with_factors(lambda factors: {name: t for name, t in factors.items() if name != FACTOR}),
        f"tuned was made for another model than policy.model: '{FACTOR}' is missing (1 tensors missing)",
    ),
    "more layers": (
        with_factors(lambda factors: factors | {FACTOR.replace(".0.", ".7."): torch.ones(2, 32)}),
        "tuned was made for another model than policy.model: "
        f"'{FACTOR.replace('.0.', '.7.')}' does not belong to this model (1 tensors)",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_files_of_an_adapter_that_cannot_be_continued_are_refused(
    policy_copy: Path, tuned: Path, tmp_path: Path, kind: str
) -> None:
    spoil, sentence = BAD[kind]
    spoil(tuned)
    refusals.Refusal(TUNED, f"policy.adapter: {sentence}").check(tmp_path)


def test_an_adapter_of_a_larger_model_is_refused(policy_copy: Path, tmp_path: Path) -> None:
    larger = str(tmp_path / "larger")
    make_policy(larger, PolicyConfig(hidden_size=96, num_layers=1), seed=0)
    save_tuned(tmp_path / "tuned", larger)
    told = "policy.adapter: tuned was made for another model than policy.model:"
    first = "base_model.model.model.layers.0.self_attn.o_proj.lora_A.weight"
    refusals.Refusal(TUNED, f"{told} '{first}' has shape [2, 96]; expected [2, 32]").check(tmp_path)


@refusals.refuses("""
    policy: {model: model, adapter: tuned}
    train: {lora: {rank: 3}}
    > train.lora.rank 3 differs from 2 of policy.adapter: leave train.lora.rank out
    policy: {model: model, adapter: tuned}
    train: {lora: {alpha: 5}}
    > train.lora.alpha 5 differs from 6 of policy.adapter: leave train.lora.alpha out
    policy: {model: model, adapter: tuned}
    train: {lora: {targets: [v_proj]}}
    > train.lora.targets v_proj differs from o_proj, q_proj of policy.adapter: leave train.lora.targets out
""")
def test_settings_must_be_those_of_the_adapter(
    refusal: refusals.Refusal, policy_copy: Path, tuned: Path, tmp_path: Path
) -> None:
    refusal.check(tmp_path)


@pytest.mark.parametrize("lora", [{}, {"rank": 2, "alpha": 6, "targets": ["q_proj", "o_proj"]}])
def test_settings_that_are_those_of_the_adapter_are_taken(
    small_policy: str, tuned: Path, lora: dict[str, Any]
) -> None:
    policy = {"model": small_policy, "adapter": str(tuned)}
    preflight(Facts(RunConfig.model_validate({"policy": policy, "train": {"lora": lora}})))


def test_an_adapter_that_only_a_worker_has_is_left_to_it(small_policy: str) -> None:
    policy = {"model": small_policy, "adapter": "/nowhere"}
    preflight(Facts(RunConfig.model_validate(LORA | {"policy": policy}), in_flow=True))


@pytest.mark.parametrize("command", ["train", "plan"])
def test_the_commands_refuse_before_anything_starts(tmp_path: Path, command: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        f"storage: {{root: {tmp_path}}}\ntrain: {{lora: {{targets: [lm_head]}}}}\n", encoding="utf-8"
    )
    commands.check_refused(
        tmp_path, [command, str(file)], f"{file}: train.lora: the target lm_head is not a linear layer"
    )


def test_the_plan_says_what_is_trained(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        f"storage: {{root: {tmp_path}}}\ntrain: {{lora: {{rank: 2, targets: [q_proj]}}}}\n", encoding="utf-8"
    )
    code, output = commands.sf("plan", str(file), "--set", "engine.kind=vllm")
    said = " ".join(output.split())
    assert code == 0, output
    assert "adapter 2,048 parameters are trained, factors of rank 2 (alpha 4) of q_proj; made anew" in said
    assert "async by rollout.overlap; vLLM with train.lora lends no trainer; t0: train steps only" in said
    assert "train.learning_rate 0.003: 3 times that of training all weights (the built-in policy, " in said


def resumed(tmp_path: Path, before: Any, after: Any) -> RunConfig:
    """The settings of a run with a batch that goes on with others."""

    def configured(lora: Any) -> RunConfig:
        return RunConfig.model_validate(
            {
                "run_id": "r",
                "storage": {"root": str(tmp_path)},
                "policy": {"hidden_size": 32, "num_layers": 1, "warmstart": None},
                "train": {"lora": lora},
            }
        )

    run = RunDirectory(configured(before).run_dir)
    run.write_config(configured(before))
    start(RunRef("r", run.uri, dataplane_url="", attempt=1))
    bench.runs.commit(run, 0, "rollout", data={})
    preflight(Facts(configured(after)))
    return resolve_config(configured(after), lambda _: None)


@pytest.mark.parametrize(
    ("before", "after", "key"),
    [
        ({"rank": 1}, {"rank": 2}, "train.lora.rank 1, not 2"),
        ({}, {"rank": 2}, "train.lora.rank 32, not 2"),
        ({"rank": 1}, {"alpha": 3}, "train.lora.alpha 2.0, not 3.0"),
        ({"rank": 1, "targets": ["q_proj"]}, {"targets": ["k_proj"]}, "train.lora.targets ('q_proj',), not"),
        (None, {"rank": 1}, "train.lora none, not"),
    ],
)
def test_a_run_goes_on_with_its_adapter_alone(tmp_path: Path, before: Any, after: Any, key: str) -> None:
    with refusals.clear_refusal(f"run r was started with {key}", "choose another run_id, or leave"):
        resumed(tmp_path, before, after)


@pytest.mark.parametrize("after", [None, {}, {"rank": 1}, {"alpha": 2}, {"rank": 1, "targets": ["q_proj"]}])
def test_what_is_left_open_stays_as_the_run_has_it(tmp_path: Path, after: Any) -> None:
    kept = resumed(tmp_path, {"rank": 1, "targets": ["q_proj"]}, after).train.lora
    assert kept is not None and (kept.rank, kept.alpha, kept.targets) == (1, 2.0, ("q_proj",))


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        ({}, ""),
        (
            {"model_type": "gpt_neox"},
            "train.lora with a model of model_type gpt_neox needs PEFT, which this Python does not have: it "
            "comes with the extra [lora] of seamlessflow",
        ),
    ],
)
def test_models_without_a_lean_decoder_need_peft(
    policy_copy: Path, monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any], sentence: str
) -> None:
    if shape:
        size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape, **size)).save_pretrained(policy_copy)
    config = LORA | {"policy": {"model": str(policy_copy)}}
    preflight(Facts(RunConfig.model_validate(config)))
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    with refusals.clear_refusal(sentence) if sentence else nullcontext():
        preflight(Facts(RunConfig.model_validate(config)))
