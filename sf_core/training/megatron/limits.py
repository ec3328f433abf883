"""What the Megatron backend cannot train. Imports no torch, because runs are checked before they start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sf_core.config import TrainConfig

MODEL_TYPES = ("llama", "qwen2", "qwen3")


def check_shape(shape: Mapping[str, Any], settings: TrainConfig) -> None:
    """Raises ValueError, one sentence, if a policy of this shape, which is named as in Hugging Face's
    config.json, cannot be trained with these settings."""
    if (kind := shape.get("model_type")) not in MODEL_TYPES:
        raise ValueError(
            f"train.backend megatron trains {', '.join(MODEL_TYPES)}, and the policy's model_type is {kind}: "
            "use train.backend torch"
        )
    unusual = {
        "attention_bias": shape.get("attention_bias") and kind != "qwen2",
        "mlp_bias": shape.get("mlp_bias"),
        "hidden_act": shape.get("hidden_act", "silu") != "silu",
        "use_sliding_window": shape.get("use_sliding_window"),
    }
    if named := [f"{name} {shape[name]}" for name, differs in unusual.items() if differs]:
        raise ValueError(
            f"train.backend megatron does not support the policy's {kind} with {' and '.join(named)}: "
            "use train.backend torch"
        )
    heads = "num_key_value_heads" if shape.get("num_key_value_heads") else "num_attention_heads"
    for setting, parts, name in (
        ("tensor_parallel", settings.tensor_parallel, heads),
        ("tensor_parallel", settings.tensor_parallel, "intermediate_size"),
        ("pipeline_parallel", settings.pipeline_parallel, "num_hidden_layers"),
    ):
        # what a folder does not say is known once it is loaded
        if (number := shape.get(name, 0)) % parts:
            raise ValueError(f"train.{setting} ({parts}) must divide the policy's {name}, which is {number}")
