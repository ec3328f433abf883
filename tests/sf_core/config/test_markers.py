"""The markers on settings: which ones are derived if they are left open, and which ones a run keeps."""

from __future__ import annotations

from sf_core.config.validation import is_derived, is_fixed, list_settings

SETTINGS = [*dict.fromkeys(list_settings())]

ADAPTER = {"train.lora.rank", "train.lora.alpha", "train.lora.targets"}


def test_settings_that_are_derived_are_marked() -> None:
    assert {key for key in SETTINGS if is_derived(key)} == ADAPTER | {
        "rollout.max_tokens",
        "engine.context_length",
        "policy.dtype",
        "train.learning_rate",
        "train.checkpoint_every",
    }


def test_a_run_with_a_batch_keeps_its_seed_policy_environment_adapter_critic_and_answers() -> None:
    keys = {"seed", "train.critic", "train.lora", "evaluate.answers"} | ADAPTER
    keys |= {key for key in SETTINGS if key.split(".")[0] in ("policy", "environment")}
    assert {key for key in SETTINGS if is_fixed(key)} == keys
