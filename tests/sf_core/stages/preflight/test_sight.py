"""What is said of multimodal policies before a run starts. What is refused by settings alone is in
tests/bad_input/test_starts.py."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from sf_core.config import RunConfig
from sf_core.engines.vllm import server
from sf_core.models.images.processor_config import PREPROCESSOR_CONFIG
from sf_core.stages.preflight.checks import preflight
from sf_core.stages.preflight.facts import Facts
from tests.bench.refusals import clear_refusal


@pytest.fixture(autouse=True)
def _without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which vLLM is here is the matter of other tests."""
    monkeypatch.setenv("SF_VLLM_PYTHON", "/nowhere/python")


def configured(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({"engine": {"kind": "vllm"}, **sections})


def test_a_folder_tells_itself_that_its_policy_sees(small_multimodal_policy: str) -> None:
    policy = {"model": small_multimodal_policy}
    preflight(Facts(configured(policy=policy, rollout={"max_picture_tokens": 64})))


def test_a_folder_whose_processor_is_missing_is_refused(small_multimodal_policy: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(small_multimodal_policy, tmp_path / "sees"))
    (folder / PREPROCESSOR_CONFIG).unlink()
    with clear_refusal("policy.model: ", str(folder), PREPROCESSOR_CONFIG, "save_pretrained(folder)"):
        preflight(Facts(configured(policy={"model": str(folder)})))


def test_heads_of_the_language_part_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    shape = {"model_type": "qwen2_5_vl", "text_config": {"head_dim": 16}}
    with clear_refusal("a width of 16 (head_dim)"):
        server.check_shape(shape)
