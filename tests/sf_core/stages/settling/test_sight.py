"""What is said of policies that see before a run starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sf_core.config import PolicyConfig, RunConfig
from sf_core.engines.vllm import limits
from sf_core.models.builtin import make_policy
from sf_core.pictures.sight import PROCESSOR
from sf_core.stages.settling.start_folder import check_start
from tests.bench.refusals import check_sentence

SEES = {"sees": True}
VLLM = {"kind": "vllm"}


@pytest.fixture(autouse=True)
def _without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which vLLM is here is the matter of other tests."""
    monkeypatch.setenv("SF_VLLM_PYTHON", "/nowhere/python")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A policy that sees, as users bring it."""
    make_policy(str(tmp_path / "sees"), PolicyConfig(sees=True, hidden_size=32, num_layers=1), seed=0)
    return tmp_path / "sees"


def configured(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({"engine": VLLM, **sections})


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        *(
            (
                {"policy": SEES, "engine": {"kind": kind}},
                f"engine.kind {kind} does not support pictures, but the policy, a qwen2_5_vl, sees pictures: "
                "use engine.kind vllm",
            )
            for kind in ("torch", "emulated")
        ),
        (
            {"policy": SEES, "train": {"backend": "megatron"}},
            "train.backend megatron trains llama, qwen2, qwen3, and the policy's model_type is qwen2_5_vl",
        ),
        (
            {"rollout": {"max_picture_tokens": 64}},
            "rollout.max_picture_tokens (64) applies only to policies that see pictures, but this "
            "policy, a qwen3,",
        ),
    ],
)
def test_settings_with_which_a_policy_is_shown_nothing_are_refused(
    sections: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError) as refused:
        check_start(configured(**sections))
    check_sentence(str(refused.value), sentence)


def test_a_teacher_that_is_shown_nothing_is_refused_for_a_policy_that_sees(
    folder: Path, small_policy: str
) -> None:
    train = {"teacher": {"model": small_policy}}
    with pytest.raises(ValueError) as refused:
        check_start(configured(policy={"model": str(folder)}, train=train))
    check_sentence(str(refused.value), "train.teacher.model: ", small_policy, "does not see pictures")


def test_a_folder_tells_itself_whether_its_policy_sees(folder: Path, small_policy: str) -> None:
    check_start(configured(policy={"model": str(folder)}, rollout={"max_picture_tokens": 64}))
    with pytest.raises(ValueError) as refused:
        check_start(configured(policy={"model": str(folder)}, engine={"kind": "torch"}))
    check_sentence(str(refused.value), "engine.kind torch does not support pictures")
    with pytest.raises(ValueError) as refused:
        check_start(configured(policy={"model": small_policy, "sees": True}))
    check_sentence(
        str(refused.value), "policy.sees applies only to the built-in policy", "leave policy.sees out"
    )
    with pytest.raises(ValueError) as refused:
        check_start(configured(policy={"model": str(folder)}, rollout={"max_picture_tokens": 3}))
    check_sentence(str(refused.value), "rollout.max_picture_tokens is 3, ", "at least 4 tokens")


def test_a_folder_whose_processor_is_missing_is_refused(folder: Path) -> None:
    (folder / PROCESSOR).unlink()
    with pytest.raises(ValueError) as refused:
        check_start(configured(policy={"model": str(folder)}))
    check_sentence(str(refused.value), "policy.model: ", str(folder), PROCESSOR, "save_pretrained(folder)")


def test_heads_of_the_language_part_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    shape = {"model_type": "qwen2_5_vl", "text_config": {"head_dim": 16}}
    with pytest.raises(ValueError) as refused:
        limits.check_shape(shape)
    check_sentence(str(refused.value), "a width of 16 (head_dim)")
