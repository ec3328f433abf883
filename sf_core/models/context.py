"""Sizes that follow from a model's Hugging Face configuration: its longest sequence, the number of its ids,
and the size of an engine's KV cache. Imports no tensor library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


def check_context(config: Mapping[str, Any], context_length: int) -> None:
    """Raises ValueError if the model does not support sequences of this many tokens."""
    longest = longest_context(config)
    if longest is not None and context_length > longest:
        raise ValueError(
            f"engine.context_length is {context_length}, but the model ({config.get('model_type')}) "
            f"supports at most {longest} tokens: lower engine.context_length, or configure rope scaling in "
            "the model"
        )


def longest_context(config: Mapping[str, Any]) -> int | None:
    """Tokens of the longest sequence, as vLLM derives max_model_len; None if the configuration does not say.
    Unlike in vLLM, rotations that change beyond some length (`dynamic`, `longrope`) end there: cached keys
    would keep the old rotation, and one long sequence of a batch would change what the others get."""
    config = config.get("text_config") or config
    positions = next((int(config[name]) for name in NAMES if config.get(name)), None)
    if positions is None:
        return None
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    # some models have one for each kind of layer
    ropes = [kind for kind in rope.values() if isinstance(kind, Mapping)] or [rope]
    return min(
        _longest_with_rope(kind, positions, config.get("original_max_position_embeddings")) for kind in ropes
    )


def _longest_with_rope(rope: Mapping[str, Any], positions: int, original: int | None) -> int:
    original = rope.get("original_max_position_embeddings") or original or positions
    match rope.get("rope_type") or rope.get("type"):
        case "longrope" | "su":
            return int(original)
        case "yarn":
            return int(original * rope.get("factor", 1.0))
        case "linear":
            return int(positions * rope.get("factor", 1.0))
        case _:
            return positions


def count_ids(config: Mapping[str, Any]) -> int | None:
    """Number of ids that a model knows: rows of its last layer. None if the configuration does not say."""
    return config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")


DTYPE_BYTES = {"float32": 4, "bfloat16": 2}

LEAN_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen2_5_vl_text")
"""Model types whose usual shapes the lean decoder runs."""


def layer_elements(num_slots: int, num_kv_heads: int, length: int, head_dim: int) -> int:
    """Number of elements of the keys and values of one layer."""
    return 2 * math.prod((num_slots, num_kv_heads, length, head_dim))


def cache_bytes(
    config: Mapping[str, Any], max_running: int, context_length: int, dtype: str = "float32"
) -> int | None:
    """Bytes that the engine reserves for this many requests of this many tokens; None if the configuration
    does not give the model's shape by the usual names."""
    head_dim = head_width(config)
    config = config.get("text_config") or config
    try:
        num_layers = int(config["num_hidden_layers"])
        num_heads = int(config["num_attention_heads"])
        num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
    except (KeyError, TypeError, ValueError):
        return None
    if head_dim is None:
        return None
    return (
        DTYPE_BYTES[dtype] * num_layers * layer_elements(max_running, num_kv_heads, context_length, head_dim)
    )


def head_width(config: Mapping[str, Any]) -> int | None:
    """Width of the attention heads; None if the configuration does not give it by the usual names."""
    config = config.get("text_config") or config
    try:
        return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def builtin_shape(hidden_size: int, num_layers: int) -> dict[str, int]:
    """The built-in policy's sizes beside those of vocabulary and context, as a Hugging Face configuration
    names them."""
    head_dim = 32
    num_heads = hidden_size // head_dim
    return {
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads // 2 if num_heads % 2 == 0 else num_heads,
        "head_dim": head_dim,
        "hidden_size": hidden_size,
        "intermediate_size": 4 * hidden_size,
    }


def count_builtin_parameters(hidden_size: int, num_layers: int) -> int:
    """Number of parameters of the built-in policy's projections, which are nearly all it has."""
    attention = 3 * hidden_size**2
    mlp = 3 * 4 * hidden_size**2
    return num_layers * (attention + mlp)
