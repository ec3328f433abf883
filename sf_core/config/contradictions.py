"""Formulas that do not go together, or have no effect: one table, a sentence each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from sf_core.recipes.advantages import CustomAdvantage, Gae, Pair, Relative, RoleBaseline, Tree, Whitened
from sf_core.recipes.losses import Clip, M2po, Plain, SequenceClip
from sf_core.recipes.weights import CustomWeight, EntropyConfidence, Fresh, Gated, Surprising

if TYPE_CHECKING:
    from sf_core.config.run_config import RunConfig


def contradictions(config: RunConfig) -> list[str]:
    """What is wrong with this configuration, by the table."""
    return [sentence.format(c=config) for is_wrong, sentence in _TABLE if is_wrong(config)]


def _compares(config: RunConfig) -> bool:
    advantage = config.train.advantage
    if isinstance(advantage, Whitened):
        return advantage.baseline
    return not isinstance(advantage, Gae | CustomAdvantage | RoleBaseline | Tree)


def _has_weight(config: RunConfig, *kinds: type) -> bool:
    return any(isinstance(weight, kinds) for weight in config.train.weights)


def _repeats_a_weight(config: RunConfig) -> bool:
    kinds = Counter(type(weight) for weight in config.train.weights if not isinstance(weight, CustomWeight))
    return max(kinds.values(), default=1) > 1


def _is_fresh_anyway(config: RunConfig) -> bool:
    bounds = [weight.max_lag for weight in config.train.weights if isinstance(weight, Fresh)]
    return bool(bounds) and max(bounds) >= config.lag_bound


def _dual(config: RunConfig) -> Clip | None:
    policy = config.train.loss.policy
    return policy if isinstance(policy, Clip) and policy.beyond == "dual" else None


_TABLE: tuple[tuple[Callable[[RunConfig], bool], str], ...] = (
    (
        lambda c: c.rollout.group_size == 1 and _compares(c),
        "train.advantage {c.train.advantage.kind} compares the sessions of a group, and rollout.group_size "
        "is 1: raise it, or take train.advantage whitened",
    ),
    (
        lambda c: c.rollout.group_size == 1 and c.rollout.gate.kind == "varied",
        "rollout.gate varied drops groups of equal rewards, which all are with rollout.group_size 1",
    ),
    (
        lambda c: c.rollout.outside_groups > c.rollout.groups_per_batch,
        "rollout.outside_groups ({c.rollout.outside_groups}) are some of the rollout.groups_per_batch "
        "({c.rollout.groups_per_batch}) groups of a batch, and cannot be more",
    ),
    (
        lambda c: isinstance(c.train.advantage, Relative) and c.rollout.failed_reward < 0,
        "train.advantage relative takes no negative rewards, and rollout.failed_reward is "
        "{c.rollout.failed_reward:g}",
    ),
    (
        lambda c: _has_weight(c, Surprising, EntropyConfidence) and c.rollout.temperature == 0,
        "rollout.temperature 0 draws no token by chance, so train.weights cannot tell certain ones from "
        "uncertain ones by their entropy",
    ),
    (
        lambda c: c.train.loss.entropy > 0 and c.rollout.temperature == 0,
        "train.loss.entropy has no effect at rollout.temperature 0 (greedy sampling)",
    ),
    (
        lambda c: isinstance(c.train.loss.policy, SequenceClip) and c.train.loss.mean_over == "token",
        "train.loss.policy sequence_clip has one ratio for each row, and with train.loss.mean_over token "
        "long rows would count for more: take mean_over session",
    ),
    (
        lambda c: isinstance(c.train.loss.policy, Plain) and c.train.loss.ratio_to == "step_start",
        "train.loss.policy plain has no ratio, so leave train.loss.ratio_to out",
    ),
    (
        lambda c: isinstance(c.train.loss.policy, M2po) and c.train.loss.ratio_to == "step_start",
        "train.loss.policy m2po fits its bounds to the ratio to the policy that sampled: leave "
        "train.loss.ratio_to out",
    ),
    (
        lambda c: (
            c.train.loss.correction is not None
            and c.train.loss.ratio_to == "behaviour"
            and not isinstance(c.train.loss.policy, Plain)
        ),
        "train.loss.correction repeats what the ratio to behaviour corrects already: add train.loss.ratio_to "
        "step_start, or leave it out",
    ),
    (
        lambda c: (dual := _dual(c)) is not None and dual.cap is None,
        "train.loss.policy.beyond dual needs a cap",
    ),
    (
        lambda c: (dual := _dual(c)) is not None and dual.cap is not None and dual.cap <= 1 + dual.high,
        "train.loss.policy.cap ({c.train.loss.policy.cap:g}) must exceed 1 + high "
        "({c.train.loss.policy.high:g}) with beyond dual",
    ),
    (
        _is_fresh_anyway,
        "train.weights fresh leaves nothing out: no token of this run lags by more than {c.lag_bound} "
        "versions (rollout.max_lag, and 0 without overlap)",
    ),
    (
        lambda c: isinstance(c.train.advantage, Gae) and c.train.critic is None,
        "train.advantage gae needs the values of a critic: add train.critic, as `critic: {{}}`",
    ),
    (
        lambda c: c.train.critic is not None and not isinstance(c.train.advantage, Gae),
        "train.critic has no use with train.advantage {c.train.advantage.kind}: take gae, or leave it out",
    ),
    (
        lambda c: _has_weight(c, Gated) and not isinstance(c.train.advantage, Gae),
        "train.weights gated needs the values of a critic: take train.advantage gae",
    ),
    (
        lambda c: isinstance(c.train.advantage, Pair) and not isinstance(c.train.loss.policy, Plain),
        "train.advantage pair is the gradient of its loss with train.loss.policy plain alone",
    ),
    (
        lambda c: isinstance(c.train.advantage, Pair) and c.train.minibatches > 1,
        "train.advantage pair is made before the first optimiser step, so train.minibatches must be 1",
    ),
    (_repeats_a_weight, "train.weights has the same kind twice"),
    (
        lambda c: (kl := c.train.loss.kl) is not None and (kl.renew_every or 0) >= c.train.iterations,
        "train.loss.kl.renew_every is not reached within train.iterations ({c.train.iterations}): leave it "
        "out for the policy at the start",
    ),
)
