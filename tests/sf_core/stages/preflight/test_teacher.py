"""Which teachers a run can have, what they take, and what is said of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from sf_core.config import RunConfig
from sf_core.models.builtin import make_tokenizer
from sf_core.scheduling.plan import Worker
from sf_core.stages.preflight.checks import preflight
from sf_core.stages.preflight.facts import Facts
from sf_core.stages.preflight.other_models import vocabulary_fault
from sf_core.stages.preflight.resolve import resolve
from sf_core.stages.preflight.sizes import PolicySizes, explain_sizes
from sf_core.training.policy_folder import count_parameters
from tests.bench import refusals
from tests.bench.policy_server import publish_run
from tests.bench.training.images import multimodal_policy

AT_URL = {"url": "http://teacher:8000", "divergence": "sampled"}


def configured(teacher: dict[str, Any], policy: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
    train = {"teacher": teacher} | sections.pop("train", {})
    return RunConfig.model_validate({"policy": policy or {}, "train": train} | sections)


def refused(config: RunConfig, *names: str, by_a_worker: bool = False) -> None:
    with refusals.clear_refusal(*names):
        preflight(Facts(config, in_flow=by_a_worker))


def rewrite(folder: Path, **facts: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | facts), encoding="utf-8")


def add_token(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["more"])
    tokenizer.save(str(folder / "tokenizer.json"))
    resize(folder, tokenizer.get_vocab_size())


def resize(folder: Path, ids: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(ids)
    model.save_pretrained(folder)


def test_the_same_tokens_are_taught_by_a_folder_a_version_and_a_server(
    tmp_path: Path, small_policy: str
) -> None:
    run = publish_run(tmp_path)
    for policy in ({}, {"model": small_policy}):
        for teacher in ({"model": small_policy}, {"model": f"{run.uri}@3"}, {"weights": "start"}):
            preflight(Facts(configured(teacher, policy)))
        preflight(Facts(configured(AT_URL | {"tokenizer": small_policy}, policy)))


def test_a_multimodal_policy_is_taught_by_one_that_sees(tmp_path: Path, small_policy: str) -> None:
    sees = multimodal_policy(str(tmp_path / "sees"))
    engine = {"kind": "vllm"}
    for policy in ({"sees": True}, {"model": sees}):
        # only a worker may have vLLM
        config = configured({"model": sees}, policy, engine=engine)
        assert vocabulary_fault(config, Facts(config)) is None
        for teacher, said in (
            ({"model": small_policy}, f"train.teacher.model: {small_policy} does not see images, but"),
            (AT_URL | {"tokenizer": sees}, "train.teacher.url: a server receives token ids only"),
        ):
            config = configured(teacher, policy, engine=engine)
            refusals.check_sentence(str(vocabulary_fault(config, Facts(config))), said)


def test_another_vocabulary_is_refused_by_its_first_token(small_policy: str, policy_copy: Path) -> None:
    add_token(policy_copy)
    # the teacher may know more
    preflight(Facts(configured({"model": str(policy_copy)}, {"model": small_policy})))
    policy = {"model": str(policy_copy)}
    size = len(make_tokenizer())
    names = (f"id {size} is 'more' for the policy and no token for the teacher", small_policy)
    refused(configured({"model": small_policy}, policy), "train.teacher.model: ", *names)
    refused(configured(AT_URL | {"tokenizer": small_policy}, policy), "train.teacher.tokenizer: ", *names)


def test_the_built_in_policy_has_a_vocabulary_too(policy_copy: Path) -> None:
    tokenizer = json.loads((policy_copy / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["model"]["vocab"]["€"] = tokenizer["model"]["vocab"].pop("a")
    (policy_copy / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    refused(
        configured({"model": str(policy_copy)}),
        "train.teacher.model: ",
        "is 'a' for the policy and '€' for the teacher",
    )


def test_padding_of_the_policy_beyond_the_teachers_is_refused(small_policy: str, policy_copy: Path) -> None:
    size = len(make_tokenizer())
    resize(policy_copy, size + 28)
    config = configured({"model": small_policy}, {"model": str(policy_copy)})
    refused(config, f"has {size:,} ids, but the policy can sample {size + 28:,}")


def test_a_teacher_of_fewer_positions_is_refused_and_bounds_what_is_derived(
    small_policy: str, policy_copy: Path
) -> None:
    rewrite(policy_copy, max_position_embeddings=300)
    teacher = {"model": str(policy_copy)}
    longer = configured(teacher, {"model": small_policy}, engine={"context_length": 301})
    refused(longer, "engine.context_length is 301", "supports at most 300 tokens")
    refused(configured(teacher), "engine.context_length is 512", "supports at most 300 tokens")
    preflight(Facts(configured(teacher, engine={"context_length": 300})))
    open_context = configured(teacher, {"model": small_policy}, rollout={"max_tokens": 100})
    derived = resolve(open_context, count_parameters(small_policy), small_policy)["engine.context_length"]
    assert derived.value == 300 and "the longest context of the model" in derived.reason


@pytest.mark.parametrize(
    "teacher", [{"model": "/nowhere"}, {"weights": "start"}, AT_URL | {"tokenizer": "/nowhere"}]
)
def test_only_the_torch_backend_has_teachers(teacher: dict[str, Any]) -> None:
    config = configured(teacher, train={"backend": "megatron"})
    refused(config, "train.teacher: only train.backend torch learns from a teacher, not megatron")


def test_a_teacher_that_is_not_here_is_one_of_a_worker(small_policy: str) -> None:
    for name in ("/nowhere", "/nowhere/run@3"):
        config = configured({"model": name}, {"model": small_policy, "dtype": "float32"})
        refused(config, "train.teacher.model: ", name)
        preflight(Facts(config, in_flow=True))
        assert explained(config)["teacher"] == (
            f"{name}, which is on a worker; each step has one more forward pass through it"
        )
    refused(
        configured(AT_URL | {"tokenizer": "/nowhere"}), "/nowhere has no tokenizer.json", by_a_worker=True
    )


def explained(config: RunConfig) -> dict[str, str]:
    return explain_sizes(config, PolicySizes.of(config))


def sizes_of(config: RunConfig) -> PolicySizes:
    sizes = PolicySizes.of(config)
    assert sizes is not None
    return sizes


@pytest.mark.parametrize("workers", [1, 3])
def test_each_rank_holds_its_part_of_the_teacher_and_of_the_reference(
    small_policy: str, policy_copy: Path, workers: int
) -> None:
    rewrite(policy_copy, dtype="bfloat16")
    policy = {"model": small_policy, "dtype": "float32"}
    parameters = count_parameters(small_policy)
    shared = {"workers": workers}
    plain = PolicySizes.of(RunConfig.model_validate({"policy": policy, "train": shared}))
    assert plain is not None and plain.frozen == 0

    kl, renewed = ({"loss": {"kl": {"coefficient": 0.1, "renew_every": every}}} for every in (None, 3))
    for sections, expected in (
        ({"teacher": {"model": small_policy}}, 4 * parameters),
        ({"teacher": {"model": str(policy_copy)}}, 2 * parameters),
        (kl, 4 * parameters),
        ({"teacher": {"weights": "start"}}, 4 * parameters),
        ({"teacher": {"model": str(policy_copy)}} | kl, 6 * parameters),
        # the start is held once
        ({"teacher": {"weights": "start"}} | kl, 4 * parameters),
        ({"teacher": {"weights": "start"}} | renewed, 8 * parameters),
        ({"teacher": AT_URL | {"tokenizer": small_policy}}, 0),
    ):
        sizes = sizes_of(RunConfig.model_validate({"policy": policy, "train": shared | sections}))
        assert sizes.frozen == sizes.rank - plain.rank == -(-expected // workers)
    # an adapter stands in for the version before
    lora = {"lora": {"rank": 2, "targets": ["q_proj"]}}
    alone = sizes_of(RunConfig.model_validate({"policy": policy, "train": lora}))
    for sections in ({"teacher": {"weights": "start"}}, kl):
        held = sizes_of(RunConfig.model_validate({"policy": policy, "train": lora | sections}))
        assert (held.frozen, held.rank) == (0, alone.rank)


def test_a_teacher_that_a_worker_has_no_memory_for_is_refused(small_policy: str) -> None:
    config = configured({"model": small_policy}, {"model": small_policy, "dtype": "float32"})
    sizes = sizes_of(config)
    worker = Worker("t0", frozenset({"train"}), memory=sizes.rank - 1)
    facts = Facts(config)
    facts.workers = [worker]
    with pytest.raises(ValueError) as refused:
        preflight(facts)
    held = f"Adam's moments, with {sizes.frozen / 1e3:,.0f} kB of models that are not trained: raise"
    refusals.check_sentence(str(refused.value), "worker t0", held)


def test_the_plan_says_what_a_teacher_costs(small_policy: str, policy_copy: Path) -> None:
    rewrite(policy_copy, dtype="bfloat16")
    policy = {"model": small_policy, "dtype": "float32"}
    millions = f"{count_parameters(small_policy) / 1e6:,.1f}"
    for teacher, sections, said in (
        (
            {"model": str(policy_copy)},
            {},
            f"{policy_copy}: qwen3, {millions} million parameters in bfloat16; each step has one more "
            "forward pass through it, about 33% more computing",
        ),
        (
            {"model": small_policy, "divergence": "sampled"},
            {"train": {"recompute": True}},
            f"{small_policy}: qwen3, {millions} million parameters in float32; each step has one more "
            "forward pass through it and one through the policy, about 50% more computing",
        ),
        (
            {"weights": "start"},
            {"train": {"lora": {"rank": 2}}},
            "version 0 of the policy, which needs no memory in addition to the adapter; each step has one "
            "more forward pass through it, about 33% more computing",
        ),
        (
            AT_URL | {"tokenizer": small_policy},
            {},
            "the server at http://teacher:8000, which the filter stage asks for the log-probs of each batch; "
            "each step has one more forward pass through the policy",
        ),
    ):
        assert explained(configured(teacher, policy, **sections))["teacher"] == said
    assert "teacher" not in explained(RunConfig.model_validate({"policy": policy}))
    told = explained(configured({"model": small_policy}, policy))["memory"]
    assert "Adam's moments, with " in told and " kB of models that are not trained" in told
