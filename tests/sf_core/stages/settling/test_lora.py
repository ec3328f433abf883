"""Which adapters a run can train, and what is said of those that it cannot."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from sf_core.config import PolicyConfig, RunConfig
from sf_core.models.adapter import Adapter, make_factors, shape_factors
from sf_core.models.builtin import make_policy
from sf_core.stages.run import RunRef
from sf_core.stages.settling import lora
from sf_core.stages.settling.start_folder import check_start
from sf_core.stages.settling.stored_config import settle_config
from sf_core.stages.start import start
from storage.run_directory import RunDirectory
from storage.tensors.weights import load_weights, save_adapter
from tests.bench.commands import check_refused, sf
from tests.bench.engines.model_folders import linears_of
from tests.bench.refusals import check_sentence
from tests.bench.runs import commit

LORA: dict[str, Any] = {"train": {"lora": {}}}
VLLM: dict[str, Any] = {"kind": "vllm"}


def save_tuned(folder: Path, model: str, rank: int = 2, dtype: str | None = None) -> Path:
    """An adapter of the model; alpha 6, of o_proj and q_proj."""
    adapter = Adapter(rank, 6.0, ("o_proj", "q_proj"))
    shapes = shape_factors(adapter, linears_of(model))
    save_adapter(str(folder), make_factors(shapes, 1), adapter.encode(model), 0, dtype)
    return folder


@pytest.fixture
def tuned(tmp_path: Path, small_policy: str) -> Path:
    return save_tuned(tmp_path / "tuned", small_policy)


def refused(config: dict[str, Any], *names: str) -> None:
    with pytest.raises(ValueError) as raised:
        check_start(RunConfig.model_validate(config))
    check_sentence(str(raised.value), *names)


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
    check_start(RunConfig.model_validate(settings))


def say(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        about = folder / "adapter_config.json"
        about.write_text(
            json.dumps(json.loads(about.read_text(encoding="utf-8")) | changes), encoding="utf-8"
        )

    return change


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


FIRST = "base_model.model.model.layers.0.self_attn.o_proj.lora_A.weight"
FACTOR = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"

BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "no configuration": (
        without("adapter_config.json"),
        "does not contain an adapter: adapter_config",
    ),
    "no factors": (
        without("adapter_model.safetensors"),
        "does not contain an adapter: adapter_model.s",
    ),
    "no JSON": (spoiled("adapter_config.json"), "cannot be read: "),
    "cut off": (
        spoiled("adapter_model.safetensors"),
        "adapter_model.safetensors: not a complete safetensors file",
    ),
    "DoRA": (say(use_dora=True), "describes DoRA (use_dora), which SeamlessFlow cannot train"),
    "rsLoRA": (say(use_rslora=True), "(use_rslora)"),
    "modules": (say(modules_to_save=["lm_head"]), "(modules_to_save)"),
    "bias": (say(bias="lora_only"), "says that biases are trained (bias: lora_only)"),
    "dropout": (say(lora_dropout=0.1), "(lora_dropout)"),
    "an alpha for each": (say(alpha_pattern={"q_proj": 3}), "(alpha_pattern)"),
    "another kind": (say(peft_type="IA3"), "describes an adapter of kind IA3; only LoRA is supported"),
    "head": (say(target_modules=["lm_head", "q_proj"]), "target lm_head is not a linear layer"),
    "rank 0": (say(r=0), "has rank 0; expected 1 to 512"),
    "rank 513": (say(r=513), "has rank 513; expected 1 to 512"),
    "alpha 0": (say(lora_alpha=0), "has alpha 0, so its factors change nothing"),
    "another rank": (
        say(r=3),
        f"was made for another model than policy.model: '{FIRST}' has shape [2, 32]; expected [3, 32]",
    ),
    "codes": (
        with_factors(lambda factors: {name: t.to(torch.int8) for name, t in factors.items()}),
        "has quantised factors (I8); training needs unquantised factors",
    ),
    "fewer layers": (
        with_factors(lambda factors: {name: t for name, t in factors.items() if name != FACTOR}),
        f"was made for another model than policy.model: '{FACTOR}' is missing (1 tensors missing)",
    ),
    "more layers": (
        with_factors(lambda factors: factors | {FACTOR.replace(".0.", ".7."): torch.ones(2, 32)}),
        "'base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight' does not belong to this model "
        "(1 tensors)",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_adapters_that_cannot_be_continued_are_refused(small_policy: str, tuned: Path, kind: str) -> None:
    spoil, sentence = BAD[kind]
    config = LORA | {"policy": {"model": small_policy, "adapter": str(tuned)}}
    check_start(RunConfig.model_validate(config))
    spoil(tuned)
    refused(config, "policy.adapter: ", sentence)


def test_an_adapter_of_a_larger_model_is_refused(tmp_path: Path, small_policy: str) -> None:
    larger = str(tmp_path / "larger")
    make_policy(larger, PolicyConfig(hidden_size=96, num_layers=1), seed=0)
    folder = save_tuned(tmp_path / "tuned", larger)
    refused(
        LORA | {"policy": {"model": small_policy, "adapter": str(folder)}},
        f"policy.adapter: {folder} was made for another model than policy.model: '{FIRST}' has shape "
        "[2, 96]; expected [2, 32]",
    )


@pytest.mark.parametrize(
    ("lora", "sentence"),
    [
        ({"rank": 3}, "train.lora.rank 3 differs from 2 of policy.adapter: leave train.lora.rank out"),
        ({"alpha": 5}, "train.lora.alpha 5 differs from 6 of policy.adapter: leave train.lora.alpha out"),
        ({"targets": ["v_proj"]}, "train.lora.targets v_proj differs from o_proj, q_proj of policy.adapter"),
        ({"rank": 2, "alpha": 6, "targets": ["q_proj", "o_proj"]}, ""),
    ],
)
def test_settings_must_be_those_of_the_adapter(
    small_policy: str, tuned: Path, lora: dict[str, Any], sentence: str
) -> None:
    config = {"policy": {"model": small_policy, "adapter": str(tuned)}, "train": {"lora": lora}}
    if sentence:
        refused(config, sentence)
    else:
        check_start(RunConfig.model_validate(config))


def test_an_adapter_that_only_a_worker_has_is_left_to_it(small_policy: str) -> None:
    policy = {"model": small_policy, "adapter": "/nowhere"}
    check_start(RunConfig.model_validate(LORA | {"policy": policy}), by_a_worker=True)


@pytest.mark.parametrize("command", ["train", "plan"])
def test_the_commands_refuse_before_anything_starts(tmp_path: Path, command: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        f"storage: {{root: {tmp_path}}}\ntrain: {{lora: {{targets: [lm_head]}}}}\n", encoding="utf-8"
    )
    check_refused(
        tmp_path, [command, str(file)], f"{file}: train.lora: the target lm_head is not a linear layer"
    )


def test_the_plan_says_what_is_trained(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        f"storage: {{root: {tmp_path}}}\ntrain: {{lora: {{rank: 2, targets: [q_proj]}}}}\n", encoding="utf-8"
    )
    code, output = sf("plan", str(file), "--set", "engine.kind=vllm")
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
    commit(run, 0, "rollout", data={})
    check_start(configured(after))
    return settle_config(configured(after), lambda _: None)


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
    with pytest.raises(ValueError) as raised:
        resumed(tmp_path, before, after)
    check_sentence(str(raised.value), f"run r was started with {key}", "choose another run_id, or leave")


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
    check_start(RunConfig.model_validate(config))
    monkeypatch.setattr(lora, "find_spec", lambda name: None)
    if sentence:
        refused(config, sentence)
    else:
        check_start(RunConfig.model_validate(config))
