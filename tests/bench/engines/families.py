"""Small configurations of many architectures of transformers."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

SMALL: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_intermediate_size": 16}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
DENSE: dict[str, dict[str, Any]] = {
    "mistral": {},
    "gemma2": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16},
    "phi3": {},
    "gpt_neox": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "falcon": {},
    "granite": {},
    "olmo2": {},
    "starcoder2": {},
    "glm4": {"head_dim": 16},
    "mamba": {"state_size": 4},
}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": EXPERTS,
    "qwen3_moe": EXPERTS | {"head_dim": 16},
    "granitemoe": EXPERTS,
    "phimoe": EXPERTS,
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 16},
    "olmoe": EXPERTS,
    # a buffer that is stored
    "deepseek_v3": EXPERTS | LATENT | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "gpt_oss": EXPERTS | {"head_dim": 16},
}
FAMILIES = DENSE | MIXTURES


def small_config(kind: str) -> PreTrainedConfig:
    return AutoConfig.for_model(kind, **SMALL | FAMILIES[kind])
