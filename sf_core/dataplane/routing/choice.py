"""The choice of an engine for a generation. No clock, no IO."""

from __future__ import annotations

from collections.abc import Sequence

from sf_core.dataplane.routing.connection import EngineConnection
from sf_core.dataplane.routing.generation import Generation

_INERTIA = 16
"""A new answer counts one part in this many in the moving mean."""


class MeanAnswerLength:
    """Moving mean of the tokens per answer, an estimate of how much of its budget a turn will use. Budgets
    are upper limits: counted in full, a short answer would weigh as much as a long prompt."""

    def __init__(self, num_tokens: float = 256.0) -> None:
        self._mean = num_tokens

    def update(self, num_tokens: int) -> None:
        self._mean += (num_tokens - self._mean) / _INERTIA

    def expected_remaining(self, generation: Generation) -> int:
        """Estimated tokens still to sample: at least 1, at most the rest of the budget."""
        num_sampled = len(generation.token_ids)
        return expected_remaining(self._mean, num_sampled, generation.request.max_tokens - num_sampled)


def expected_remaining(mean: float, num_sampled: int, budget: int) -> int:
    """Expected further tokens of a turn that has sampled `num_sampled`: the rest up to the mean, or as many
    again if that is more. That is the mean residual life of a Pareto distribution of index 2; lengths of
    answers have heavy tails.

    >>> [expected_remaining(256.0, num_sampled, 1000) for num_sampled in (0, 100, 400)]
    [256, 156, 400]
    """
    return max(1, min(budget, max(round(mean) - num_sampled, num_sampled)))


def num_cached(engine: EngineConnection, generation: Generation) -> int:
    """Number of leading prompt tokens that are probably in the engine's KV cache: it sampled the parent turn,
    or this turn before an interruption, with the weights it has now."""
    hint = generation.cache_hint
    if hint is None or hint.engine_id != engine.engine_id or hint.version != engine.version:
        return 0
    # the last token is always computed: the first draw needs its logits
    return min(hint.num_tokens, generation.num_tokens - 1)


def choose(candidates: Sequence[EngineConnection], generation: Generation) -> EngineConnection:
    """The engine that would finish this generation first, measured in tokens:

        cost(engine) = outstanding(engine) + len(prompt) - num_cached(engine, generation)

    Tokens to be sampled cost the same everywhere and drop out. So a branch stays with the engine of its
    parent turn exactly as long as the cached tokens outweigh the difference between that engine's queue and
    the shortest one. No affinity is stored: a turn carries where its parent ran.
    """
    return min(
        candidates,
        key=lambda engine: (engine.outstanding - num_cached(engine, generation), len(engine.in_flight)),
    )
