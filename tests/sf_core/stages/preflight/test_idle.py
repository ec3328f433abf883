"""Settings with which a run would train nothing are refused, or told, before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from sf_core.config import RunConfig
from sf_core.models.adapter import find_weights_outside_linears, list_linears
from sf_core.stages.preflight.checks import preflight
from sf_core.stages.preflight.facts import Facts
from sf_core.stages.preflight.first_tasks import predict_warnings
from sf_core.training.policy_folder import read_model_config
from sf_core.types import Task
from tests.bench import engines, refusals
from tests.bench.policy_server import publish_run


def kl(**settings: Any) -> dict[str, Any]:
    return {"train": {"loss": {"kl": {"coefficient": 0.1} | settings}}}


@pytest.mark.parametrize(
    "sections",
    [
        kl(),
        kl(estimator="k2"),
        kl(estimator="k1", place="reward"),
        kl(renew_every=2),
        {"train": {"minibatches": 2, "loss": {"kl": {"coefficient": 0.1, "renew_every": 1}}}},
        {"train": {"advantage": "whitened"}, "rollout": {"group_size": 1}},
    ],
)
def test_settings_with_an_effect_are_not(sections: dict[str, Any]) -> None:
    config = RunConfig.model_validate(sections)
    preflight(Facts(config))
    assert predict_warnings(config) == []


def test_a_run_that_began_before_a_rule_goes_on_and_is_told(tmp_path: Path) -> None:
    run = publish_run(tmp_path)
    stored = run.read_config(RunConfig).model_dump(exclude_unset=True)
    before = RunConfig.model_validate(stored | {"run_id": run.run_id, "train": kl(estimator="k1")["train"]})
    run.write_config(before)
    assert run.read_config(RunConfig).train.loss.kl is not None
    preflight(Facts(before))
    assert [sentence for sentence in predict_warnings(before) if "estimator k1" in sentence]


TOLD: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "temperature 0": (
        {"rollout": {"temperature": 0}},
        ("rollout.temperature 0", "train.advantage group has no signal", "set rollout.temperature 1"),
    ),
    "temperature of almost 0": ({"rollout": {"temperature": 1e-6}}, ("rollout.temperature 0.01",)),
    "top_k 1": ({"rollout": {"top_k": 1}}, ("top_k 1", "train.advantage group has no signal")),
    "top_p of almost 0": ({"rollout": {"top_p": 1e-9}}, ("top_p 1e-06",)),
    "branches": ({"rollout": {"top_k": 1}, "train": {"advantage": "tree"}}, ("train.advantage tree",)),
    "a baseline of the group": (
        {"rollout": {"top_k": 1}, "train": {"advantage": {"kind": "whitened", "baseline": True}}},
        ("train.advantage whitened has no signal",),
    ),
    "clip": (
        {"train": {"loss": {"policy": {"low": 1e-9}}}},
        ("train.loss.policy has a clip range below 1e-6", "raise train.loss.policy.low"),
    ),
    "warmup": (
        {"train": {"warmup_steps": 80, "iterations": 20, "minibatches": 4}},
        ("train.warmup_steps (80) reaches beyond the last optimiser step", "train.iterations 20"),
    ),
}


@pytest.mark.parametrize("case", TOLD)
def test_settings_that_hardly_train_are_told(case: str) -> None:
    sections, names = TOLD[case]
    config = RunConfig.model_validate(sections)
    preflight(Facts(config))
    [sentence] = predict_warnings(config)
    refusals.check_sentence(sentence, *names)


@pytest.mark.parametrize(
    "sections",
    [
        {"rollout": {"temperature": 0}, "train": {"advantage": "whitened"}},
        {"rollout": {"top_k": 1}, "train": {"advantage": "none", "teacher": {"model": "/nowhere"}}},
        {"rollout": {"top_k": 2}},
        {"train": {"warmup_steps": 79, "iterations": 20, "minibatches": 4}},
    ],
)
def test_others_are_not_told(sections: dict[str, Any]) -> None:
    assert predict_warnings(RunConfig.model_validate(sections)) == []


def one_question(split: str, index: int) -> Task:
    return Task(f"{split}-{index}", "sums", "What is 2+3?" if split == "train" else f"{index}?", answer="5")


def half_a_question(split: str, index: int) -> Task:
    prompt = "What is 2+3?" if index % 2 and split == "train" else f"{split} {index}?"
    return Task(f"{split}-{index}", "sums", prompt, answer=prompt)


def some_questions(split: str, index: int) -> Task:
    return Task(f"{split}-{index}", "sums", f"{split} {index % 3}?", answer="5")


def without_prompt(split: str, index: int) -> Task:
    return Task(f"{split}-{index}", "sums", "", metadata={"split": split})


@pytest.mark.parametrize(("tasks", "number"), [(one_question, 256), (half_a_question, 128)])
def test_equal_training_prompts_are_told(tasks: Any, number: int) -> None:
    named = {"environment": {"tasks": f"{__name__}:{tasks.__name__}"}}
    [sentence] = predict_warnings(RunConfig.model_validate(named))
    told = f"{number} of the first 256 training tasks have the same prompt, 'What is 2+3?', so"
    refusals.check_sentence(sentence, told)


@pytest.mark.parametrize("tasks", [some_questions, without_prompt])
def test_prompts_of_which_fewer_are_equal_are_not_told(tasks: Any) -> None:
    named = {"environment": {"tasks": f"{__name__}:{tasks.__name__}"}}
    assert predict_warnings(RunConfig.model_validate(named)) == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (made := tmp_path / "model").mkdir()
    engines.model_folders.write_tokenizer(made)
    (made / "tokenizer_config.json").write_text('{"eos_token": "<end>"}', encoding="utf-8")
    (made / "chat_template.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    return made


def adapted(folder: Path, kind: str, **settings: Any) -> RunConfig:
    AutoModelForCausalLM.from_config(engines.families.small_config(kind)).save_pretrained(folder)
    sections = {"policy": {"model": str(folder)}, "train": {"lora": settings}, "rollout": {"max_tokens": 16}}
    return RunConfig.model_validate(sections)


@pytest.mark.parametrize("kind", engines.families.MIXTURES)
def test_an_adapter_that_would_leave_experts_out_is_refused_with_their_share(folder: Path, kind: str) -> None:
    config = adapted(folder, kind)
    shape = read_model_config(str(folder))
    share, _ = find_weights_outside_linears(shape)
    assert share > 0.3
    with refusals.clear_refusal(
        "train.lora trains linear layers only",
        f"{share:.0%} of the weights in the blocks of a {kind} model",
        "name the layers to train in train.lora.targets",
    ):
        preflight(Facts(config))
    target = next(name.rpartition(".")[2] for name in list_linears(shape))
    preflight(Facts(adapted(folder, kind, targets=[target])))


@pytest.mark.parametrize("kind", sorted(engines.families.DENSE.keys() - {"mamba"}))
def test_an_adapter_of_a_dense_model_reaches_all_of_it(folder: Path, kind: str) -> None:
    preflight(Facts(adapted(folder, kind)))
