"""The longest sequence of a model and the number of its ids, by its Hugging Face configuration. Imports no
tensor library."""

from __future__ import annotations

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
