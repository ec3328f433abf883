"""Which engine a generation goes to. Pure: no clock, no frames."""

from __future__ import annotations

from collections.abc import Sequence

from sf_core.dataplane.routing.connection import EngineLink
from sf_core.dataplane.routing.generation import Generation

_INERTIA = 16


class TypicalLength:
    """How many tokens a turn samples: the moving mean over the last turns, as the estimate of a budget's use.
    Budgets are ceilings; counted as they are, one idle turn would weigh as much as a long prompt."""

    def __init__(self, num_tokens: float = 256.0) -> None:
        self._mean = num_tokens

    def learn(self, num_tokens: int) -> None:
        self._mean += (num_tokens - self._mean) / _INERTIA

    def remaining(self, generation: Generation) -> int:
        """At least 1, at most what is left of the budget."""
        produced = len(generation.token_ids)
        return expected_rest(self._mean, produced, generation.max_tokens - produced)


def expected_rest(mean: float, produced: int, budget: int) -> int:
    """How many tokens a turn will sample that has sampled some: up to the mean; one that is longer, as many
    again. That is the mean residual life of a Pareto tail of index 2; lengths of answers have heavy tails.

    >>> [expected_rest(256.0, produced, 1000) for produced in (0, 100, 400)]
    [256, 156, 400]
    """
    return max(1, min(budget, max(round(mean) - produced, produced)))


def num_cached(link: EngineLink, generation: Generation) -> int:
    """Leading tokens of the generation's prompt whose KV the engine probably holds: it sampled the parent
    turn, or this turn until it was interrupted, with the weights it has now."""
    near = generation.near
    if near is None or near.engine_id != link.engine_id or near.version != link.version:
        return 0
    # the last token is always computed: the first draw needs its logits
    return min(near.num_tokens, generation.num_tokens - 1)


def choose(takers: Sequence[EngineLink], generation: Generation) -> EngineLink:
    """The engine that would be through with this generation first, in tokens:

        cost(engine) = outstanding(engine) + len(prompt) - num_cached(engine, generation)

    What is to be sampled costs the same everywhere and drops out. So a branch stays with the engine of its
    parent turn exactly as long as the cached tokens outweigh how much longer that engine's queue is than the
    shortest. Nothing is remembered here: a turn carries where its parent ran.
    """
    return min(
        takers,
        key=lambda link: (link.outstanding - num_cached(link, generation), len(link.in_flight)),
    )
