"""The choice of an engine for a generation. No clock, no IO."""

from __future__ import annotations

from collections.abc import Sequence

from sf_core.dataplane.routing.connection import EngineConnection
from sf_core.dataplane.routing.generation import Generation

_INERTIA = 16


class TypicalLength:
    """Moving mean of the tokens that a turn samples, an estimate of how much of its budget a turn will use.
    Budgets are ceilings: counted in full, one short answer would weigh as much as a long prompt."""

    def __init__(self, num_tokens: float = 256.0) -> None:
        self._mean = num_tokens

    def learn(self, num_tokens: int) -> None:
        self._mean += (num_tokens - self._mean) / _INERTIA

    def remaining(self, generation: Generation) -> int:
        """Estimated tokens still to sample: at least 1, at most the rest of the budget."""
        produced = len(generation.token_ids)
        return expected_rest(self._mean, produced, generation.request.max_tokens - produced)


def expected_rest(mean: float, produced: int, budget: int) -> int:
    """Expected further tokens of a turn that has sampled `produced`: the rest up to the mean, or as many
    again if that is more. That is the mean residual life of a Pareto distribution of index 2; lengths of
    answers have heavy tails.

    >>> [expected_rest(256.0, produced, 1000) for produced in (0, 100, 400)]
    [256, 156, 400]
    """
    return max(1, min(budget, max(round(mean) - produced, produced)))


def num_cached(engine: EngineConnection, generation: Generation) -> int:
    """Number of leading prompt tokens that are probably in the engine's KV cache: it sampled the parent turn,
    or this turn before an interruption, with the weights it has now."""
    near = generation.near
    if near is None or near.engine_id != engine.engine_id or near.version != engine.version:
        return 0
    # the last token is always computed: the first draw needs its logits
    return min(near.num_tokens, generation.num_tokens - 1)


def choose(takers: Sequence[EngineConnection], generation: Generation) -> EngineConnection:
    """The engine that would finish this generation first, measured in tokens:

        cost(engine) = outstanding(engine) + len(prompt) - num_cached(engine, generation)

    Tokens to be sampled cost the same everywhere and drop out. So a branch stays with the engine of its
    parent turn exactly as long as the cached tokens outweigh how much longer that engine's queue is than the
    shortest. No affinity is stored: a turn carries where its parent ran.
    """
    return min(
        takers,
        key=lambda engine: (engine.outstanding - num_cached(engine, generation), len(engine.in_flight)),
    )
