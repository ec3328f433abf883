"""Settings that would train nothing, or nothing that was meant: refused before a run begins, or told.

These rules are no part of the configuration's own (sf_core/config/contradictions.py), because a run that
began before a rule must still be read. Such a run is told of what a new run is refused for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sf_core.config import RunConfig
from sf_core.config.rollout_config import LEAST_TEMPERATURE, LEAST_TOP_P
from sf_core.models.adapter import find_weights_outside_linears
from sf_core.recipes.advantages import CustomAdvantage, Gae, RoleBaseline, Whitened
from sf_core.recipes.losses import Clip, SequenceClip
from sf_core.recipes.weights import EntropyConfidence, Surprising
from sf_core.stages.preflight.facts import Facts
from sf_core.stages.preflight.stored_config import has_started
from sf_core.types import Task

MOST_EQUAL = 100
"""Training tasks, of the first ones, from which on equal prompts are told."""

LARGEST_UNREACHED = 0.05
"""Share of the blocks' weights that an adapter of all linear layers may leave without factors."""

_ROUNDING = 1e-6
"""Clip range below which the rounding of float32 log-probs decides what is clipped."""


def idle_setting(config: RunConfig, facts: Facts) -> str | None:
    """A setting without any effect, in a run that has not begun."""
    return None if facts.has_started else next(iter(_list_idle(config)), None)


def warn_of_idle(config: RunConfig, tasks: Sequence[Task] = ()) -> list[str]:
    """Warnings of the settings and of the first training tasks of a run, as sentences."""
    found = [sentence.format(c=config) for is_so, sentence in _TOLD if is_so(config)]
    prompts = Counter(task.prompt for task in tasks if task.prompt)
    for prompt, number in prompts.most_common(1):
        if number >= MOST_EQUAL:
            shown = repr(prompt if len(prompt) <= 60 else f"{prompt[:60]}...")
            found.append(
                f"{number} of the first {len(tasks)} training tasks have the same prompt, {shown}, so the "
                "policy is trained on one question, unless the agent reads other fields of the task"
            )
    return (_list_idle(config) if has_started(config) else []) + found


def describe_unreached(config: RunConfig, shape: Mapping[str, Any]) -> str | None:
    """One sentence, if an adapter of all layers would leave many weights in the blocks of a model of this
    shape without factors. The weights of experts, for example, are no linear layers."""
    lora = config.train.lora
    if lora is None or lora.targets is not None or config.policy.adapter is not None:
        return None
    share, names = find_weights_outside_linears(shape)
    if share <= LARGEST_UNREACHED:
        return None
    return (
        f"train.lora trains linear layers only, and {share:.0%} of the weights in the blocks of a "
        f"{shape['model_type']} model are in none of them ({', '.join(names[:3])}): name the layers to "
        "train in train.lora.targets, or leave train.lora out to train all weights"
    )


def _list_idle(config: RunConfig) -> list[str]:
    return [sentence.format(c=config) for is_so, sentence in _REFUSED if is_so(config)]


def _is_greedy(config: RunConfig) -> bool:
    rollout = config.rollout
    return rollout.temperature == 0 or rollout.top_k == 1 or rollout.top_p <= LEAST_TOP_P


def _compares_equal_answers(config: RunConfig) -> bool:
    """Whether advantages compare the sessions of groups in which all have the same answer."""
    advantage = config.train.advantage
    goes_by_batch = isinstance(advantage, Gae | CustomAdvantage | RoleBaseline) or (
        isinstance(advantage, Whitened) and not advantage.baseline
    )
    is_greedy = _is_greedy(config) or config.rollout.temperature <= LEAST_TEMPERATURE
    return is_greedy and not (goes_by_batch or advantage.kind == "none" or config.rollout.is_external)


def _weighs_entropy(config: RunConfig) -> bool:
    by_entropy = any(isinstance(weight, Surprising | EntropyConfidence) for weight in config.train.weights)
    return config.train.loss.entropy > 0 or by_entropy


def _is_own_reference(config: RunConfig) -> bool:
    kl = config.train.loss.kl
    return kl is not None and kl.renew_every == 1 and (kl.place == "reward" or config.train.minibatches == 1)


def _has_one_session(config: RunConfig) -> bool:
    rollout = config.rollout
    return rollout.group_size * rollout.groups_per_batch == 1 and isinstance(
        config.train.advantage, Whitened | RoleBaseline
    )


def _clips_by_rounding(config: RunConfig) -> bool:
    policy = config.train.loss.policy
    return isinstance(policy, Clip | SequenceClip) and min(policy.low, policy.high) < _ROUNDING


_Rule = tuple[Callable[[RunConfig], bool], str]

_REFUSED: tuple[_Rule, ...] = (
    (
        lambda c: (kl := c.train.loss.kl) is not None and (kl.estimator, kl.place) == ("k1", "loss"),
        "train.loss.kl.estimator k1 with `place: loss` has a mean gradient of 0, so the penalty keeps the "
        "policy nowhere: use estimator k2, whose gradient is that of the divergence, or set `place: reward`",
    ),
    (
        _is_own_reference,
        "train.loss.kl.renew_every 1 makes the policy at the start of each train step its own reference, so "
        "the penalty is 0: raise train.loss.kl.renew_every, or leave train.loss.kl out",
    ),
    (
        _has_one_session,
        "train.advantage {c.train.advantage.kind} compares the sessions of a batch, but "
        "rollout.groups_per_batch and rollout.group_size are 1, so all advantages are 0: raise one of them",
    ),
    (
        lambda c: c.rollout.temperature > 0 and _is_greedy(c) and _weighs_entropy(c),
        "train.loss.entropy and the train.weights that go by entropy have no effect if the engine samples "
        "the most likely token only: raise rollout.top_k or rollout.top_p, or leave them out",
    ),
)

_TOLD: tuple[_Rule, ...] = (
    (
        _compares_equal_answers,
        "the engine samples the most likely token (rollout.temperature {c.rollout.temperature:g}, top_k "
        "{c.rollout.top_k}, top_p {c.rollout.top_p:g}), so the sessions of a group give equal answers, and "
        "train.advantage {c.train.advantage.kind} has no signal unless tools or agents differ between them: "
        "set rollout.temperature 1, top_k 0 and top_p 1",
    ),
    (
        _clips_by_rounding,
        "train.loss.policy has a clip range below 1e-6, so rounding decides which tokens are clipped: raise "
        "train.loss.policy.low and train.loss.policy.high",
    ),
    (
        lambda c: c.train.warmup_steps >= c.train.iterations * c.train.minibatches,
        "train.warmup_steps ({c.train.warmup_steps}) reaches beyond the last optimiser step of the run "
        "(train.iterations {c.train.iterations} x train.minibatches {c.train.minibatches}), so the learning "
        "rate is never reached: lower train.warmup_steps",
    ),
)
