"""How much memory the keys and values of an engine take, by its settings and the model's Hugging Face
configuration. Loads no library that computes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

ELEMENT_BYTES = 4
"""The engine holds them in float32."""

_BLOCK = 16
"""The capacity grows in steps of this many tokens."""


def round_up(length: int) -> int:
    """The tokens of a slot that has room for so many."""
    return -(-length // _BLOCK) * _BLOCK


def layer_elements(num_slots: int, num_kv_heads: int, length: int, head_dim: int) -> int:
    """Keys and values of one layer."""
    return 2 * math.prod((num_slots, num_kv_heads, round_up(length), head_dim))


def cache_bytes(config: Mapping[str, Any], max_running: int, context_length: int) -> int | None:
    """What the engine reserves for this many requests of this many tokens; None if the configuration does not
    say in the usual names what shape the model has."""
    config = config.get("text_config") or config
    try:
        num_layers, num_heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
        num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
        head_dim = int(config.get("head_dim") or config["hidden_size"] // num_heads)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
    # one piece more than there are layers: each is laid out anew from its own into the spare one
    elements = layer_elements(max_running, num_kv_heads, context_length, head_dim)
    return ELEMENT_BYTES * (num_layers + 1) * elements


def too_large(num_bytes: int, max_running: int, context_length: int, given: str) -> str:
    """The sentence for a cache that does not fit; `given` says what there is instead."""
    return (
        f"the engine's cache takes {num_bytes / 1e9:,.1f} GB, for engine.max_running {max_running} requests "
        f"of engine.context_length {context_length} tokens, and {given}: lower one of the two"
    )


def built_in_shape(hidden_size: int, num_layers: int) -> dict[str, int]:
    """The built-in policy's heads and layers, as a Hugging Face configuration names them."""
    head_dim = 32
    num_heads = hidden_size // head_dim
    return {
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads // 2 if num_heads % 2 == 0 else num_heads,
        "head_dim": head_dim,
    }
