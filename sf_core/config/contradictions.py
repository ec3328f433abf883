"""Formulas that do not go together, or have no effect: one table, a sentence each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

from sf_core.config.rollout_config import EnvironmentConfig, RolloutConfig
from sf_core.config.train_config import TrainConfig
from sf_core.recipes.advantages import CustomAdvantage, Gae, Pair, Relative, RoleBaseline, Tree, Whitened
from sf_core.recipes.curriculum import Curriculum
from sf_core.recipes.gates import Mixed, Varied
from sf_core.recipes.losses import Clip, M2po, Plain, SequenceClip
from sf_core.recipes.selections import Extremes
from sf_core.recipes.weights import CustomWeight, EntropyConfidence, Fresh, Gated, Surprising


class Sections(NamedTuple):
    """The sections of a configuration that the rules compare."""

    environment: EnvironmentConfig
    rollout: RolloutConfig
    train: TrainConfig
    lag_bound: int


def find_contradictions(config: Sections) -> list[str]:
    """What is wrong with this configuration, by the table."""
    return [sentence.format(c=config) for is_wrong, sentence in _TABLE if is_wrong(config)]


def _compares(config: Sections) -> bool:
    advantage = config.train.advantage
    if isinstance(advantage, Whitened):
        return advantage.baseline
    is_alone = isinstance(advantage, Gae | CustomAdvantage | RoleBaseline | Tree)
    return not is_alone and advantage.kind != "none"


def _has_weight(config: Sections, *kinds: type) -> bool:
    return any(isinstance(weight, kinds) for weight in config.train.weights)


def _repeats_a_weight(config: Sections) -> bool:
    kinds = Counter(type(weight) for weight in config.train.weights if not isinstance(weight, CustomWeight))
    return max(kinds.values(), default=1) > 1


def _is_fresh_anyway(config: Sections) -> bool:
    bounds = [weight.max_lag for weight in config.train.weights if isinstance(weight, Fresh)]
    return bool(bounds) and max(bounds) >= config.lag_bound


def _rules(config: Sections) -> Curriculum:
    """The rules by which tasks are chosen; those without effect if there is no curriculum."""
    return config.rollout.curriculum or Curriculum()


def _without_pool(config: Sections) -> bool:
    rules = _rules(config)
    goes_by_the_past = rules.order == "draw" or rules.solved < 1 or rules.unsolved < 1
    return rules.pool is None and (goes_by_the_past or rules.sizes is not None)


def _is_small(config: Sections) -> bool:
    pool = _rules(config).pool
    most_in_flight = config.rollout.groups_per_batch * (1 + config.lag_bound)
    return pool is not None and pool <= most_in_flight


def _draws_nothing(config: Sections) -> bool:
    rules = _rules(config)
    default = Curriculum()
    return rules.order != "draw" and (rules.explore, rules.utility) != (default.explore, default.utility)


def _ends(config: Sections) -> list[int | None]:
    """Iterations at which stages end, without the last."""
    return [stage.until for stage in _rules(config).stages[:-1]]


def _are_out_of_order(config: Sections) -> bool:
    ends = _ends(config)
    stages = _rules(config).stages
    rise = None not in ends and all(a < b for a, b in pairwise(ends))  # type: ignore[operator]
    return not rise or (bool(stages) and stages[-1].until is not None)


def _least_to_pass(config: Sections) -> int:
    """Sessions of the smallest group that can pass the gate."""
    gate = config.rollout.gate
    return 2 * gate.least if isinstance(gate, Mixed) else 2 if isinstance(gate, Varied) else 1


def _dual(config: Sections) -> Clip | None:
    policy = config.train.loss.policy
    return policy if isinstance(policy, Clip) and policy.beyond == "dual" else None


def _goes_by_idle_rewards(config: Sections) -> bool:
    rollout = config.rollout
    kl = config.train.loss.kl
    chooses = rollout.gate.kind != "all" or rollout.curriculum is not None or config.train.select is not None
    goes = chooses or (kl is not None and kl.place == "reward")
    return goes and config.train.advantage.kind == "none"


def _num_kept(config: Sections) -> int | None:
    """Sessions of a group that train, if not all do."""
    return config.train.select.keep if isinstance(config.train.select, Extremes) else None


_TABLE: tuple[tuple[Callable[[Sections], bool], str], ...] = (
    (
        lambda c: c.rollout.group_size == 1 and _compares(c),
        "train.advantage {c.train.advantage.kind} compares the sessions of a group, but rollout.group_size "
        "is 1: raise rollout.group_size, or use train.advantage whitened",
    ),
    (
        lambda c: c.rollout.group_size == 1 and c.rollout.gate.kind == "varied",
        "rollout.gate varied drops groups in which all rewards are equal, so with rollout.group_size 1 the "
        "gate would drop every group",
    ),
    (
        lambda c: isinstance(c.rollout.gate, Mixed) and c.rollout.group_size < _least_to_pass(c),
        "rollout.gate mixed needs {c.rollout.gate.least} right and {c.rollout.gate.least} wrong sessions, "
        "but a group has {c.rollout.group_size} (rollout.group_size): lower `least`",
    ),
    (
        lambda c: (c.rollout.least_sessions or 0) > c.rollout.group_size,
        "rollout.least_sessions ({c.rollout.least_sessions}) must not exceed rollout.group_size "
        "({c.rollout.group_size})",
    ),
    (
        _without_pool,
        "rollout.curriculum with `order: draw`, `sizes`, or `solved` or `unsolved` below 1 uses the earlier "
        "results of tasks, but without `pool` no task is sampled twice: set rollout.curriculum.pool",
    ),
    (
        _is_small,
        "rollout.curriculum.pool ({c.rollout.curriculum.pool}) must exceed the number of groups in flight, "
        "rollout.groups_per_batch ({c.rollout.groups_per_batch}) times 1 + lag ({c.lag_bound}), because "
        "two groups never sample a task at the same time",
    ),
    (
        _are_out_of_order,
        "rollout.curriculum.stages: each stage except the last needs an `until` above the `until` of the "
        "previous stage; the last stage must not have an `until`",
    ),
    (
        lambda c: any((end or 0) >= c.train.iterations for end in _ends(c)),
        "rollout.curriculum.stages has a stage that begins after the last iteration (train.iterations "
        "{c.train.iterations}): lower the `until` of the previous stage, or leave this stage out",
    ),
    (
        lambda c: bool(_rules(c).stages) and c.environment.tasks is not None,
        "rollout.curriculum.stages are shares of an environment's parts, but environment.tasks, a function "
        "of your own, has no parts: leave one of the two out",
    ),
    (
        _draws_nothing,
        "rollout.curriculum.explore and rollout.curriculum.utility have no effect with `order: epochs`: use "
        "`order: draw`, or leave `explore` and `utility` out",
    ),
    (
        lambda c: c.rollout.curriculum is not None and c.rollout.is_external,
        "rollout.curriculum chooses tasks of the environment, but all groups are external "
        "(rollout.outside_groups): leave one of the two out",
    ),
    (
        lambda c: (sizes := _rules(c).sizes) is not None and sizes.fewer >= c.rollout.group_size,
        "rollout.curriculum.sizes.fewer ({c.rollout.curriculum.sizes.fewer}) must be below "
        "rollout.group_size ({c.rollout.group_size})",
    ),
    (
        lambda c: (sizes := _rules(c).sizes) is not None and sizes.fewer == 1 and _compares(c),
        "train.advantage {c.train.advantage.kind} compares the sessions of a group, but "
        "rollout.curriculum.sizes.fewer is 1: raise rollout.curriculum.sizes.fewer, or use "
        "train.advantage whitened",
    ),
    (
        lambda c: (
            (sizes := _rules(c).sizes) is not None and sizes.fewer < _least_to_pass(c) <= c.rollout.group_size
        ),
        "rollout.gate {c.rollout.gate.kind} drops every group of {c.rollout.curriculum.sizes.fewer} "
        "sessions: raise rollout.curriculum.sizes.fewer",
    ),
    (
        lambda c: c.environment.group_reward is not None and c.rollout.spare_sessions > 0,
        "environment.group_reward waits for the answers of all sessions of a group, but "
        "rollout.spare_sessions stops the slowest sessions: leave one of the two out",
    ),
    (
        lambda c: c.environment.group_reward is not None and c.rollout.outside_groups > 0,
        "environment.group_reward scores the answers of the run's own agents, but the rewards of "
        "rollout.outside_groups are external: leave one of the two out",
    ),
    (
        lambda c: c.rollout.outside_groups > c.rollout.groups_per_batch,
        "rollout.outside_groups ({c.rollout.outside_groups}) must not exceed rollout.groups_per_batch "
        "({c.rollout.groups_per_batch})",
    ),
    (
        lambda c: isinstance(c.train.advantage, Relative) and c.rollout.failed_reward < 0,
        "train.advantage relative does not support negative rewards, but rollout.failed_reward is "
        "{c.rollout.failed_reward:g}",
    ),
    (
        lambda c: _has_weight(c, Surprising, EntropyConfidence) and c.rollout.temperature == 0,
        "train.weights cannot rank tokens by entropy at rollout.temperature 0 (greedy sampling)",
    ),
    (
        lambda c: c.train.loss.entropy > 0 and c.rollout.temperature == 0,
        "train.loss.entropy has no effect at rollout.temperature 0 (greedy sampling)",
    ),
    (
        lambda c: isinstance(c.train.loss.policy, SequenceClip) and c.train.loss.mean_over == "token",
        "train.loss.policy sequence_clip has one ratio per row, but train.loss.mean_over token gives long "
        "rows more weight: use mean_over session",
    ),
    (
        lambda c: isinstance(c.train.loss.policy, Plain) and c.train.loss.ratio_to == "step_start",
        "train.loss.policy plain has no ratio: leave train.loss.ratio_to out",
    ),
    (
        lambda c: isinstance(c.train.loss.policy, M2po) and c.train.loss.ratio_to == "step_start",
        "train.loss.policy m2po computes its bounds from the ratio to the policy that sampled: leave "
        "train.loss.ratio_to out",
    ),
    (
        lambda c: (
            c.train.loss.correction is not None
            and c.train.loss.ratio_to == "behaviour"
            and not isinstance(c.train.loss.policy, Plain)
        ),
        "train.loss.ratio_to behaviour already corrects for lag, so train.loss.correction would correct "
        "for lag twice: set train.loss.ratio_to step_start, or leave train.loss.correction out",
    ),
    (
        lambda c: (dual := _dual(c)) is not None and dual.cap is None,
        "train.loss.policy.beyond dual needs train.loss.policy.cap",
    ),
    (
        lambda c: (dual := _dual(c)) is not None and dual.cap is not None and dual.cap <= 1 + dual.high,
        "train.loss.policy.cap ({c.train.loss.policy.cap:g}) must exceed 1 + `high` "
        "({c.train.loss.policy.high:g}) with `beyond: dual`",
    ),
    (
        _is_fresh_anyway,
        "train.weights fresh has no effect: the lag of this run's tokens is at most {c.lag_bound} "
        "(rollout.max_lag, or 0 without overlap)",
    ),
    (
        lambda c: isinstance(c.train.advantage, Gae) and c.train.critic is None,
        "train.advantage gae needs the values of a critic: add train.critic, as `critic: {{}}`",
    ),
    (
        lambda c: c.train.critic is not None and not isinstance(c.train.advantage, Gae),
        "train.critic has no effect with train.advantage {c.train.advantage.kind}: use train.advantage "
        "gae, or leave train.critic out",
    ),
    (
        lambda c: _has_weight(c, Gated) and not isinstance(c.train.advantage, Gae),
        "train.weights gated needs the values of a critic: use train.advantage gae",
    ),
    (
        lambda c: isinstance(c.train.advantage, Pair) and not isinstance(c.train.loss.policy, Plain),
        "train.advantage pair needs train.loss.policy plain",
    ),
    (
        lambda c: isinstance(c.train.advantage, Pair) and c.train.minibatches > 1,
        "train.advantage pair is computed before the first optimiser step, so train.minibatches must be 1",
    ),
    (_repeats_a_weight, "train.weights lists the same kind twice"),
    (
        lambda c: (kl := c.train.loss.kl) is not None and (kl.renew_every or 0) >= c.train.iterations,
        "train.loss.kl.renew_every must be less than train.iterations ({c.train.iterations}): leave "
        "renew_every out to keep the policy at the start as the reference",
    ),
    (
        lambda c: (keep := _num_kept(c)) is not None and keep >= c.rollout.group_size,
        "train.select.keep ({c.train.select.keep}) must be below rollout.group_size "
        "({c.rollout.group_size}): lower train.select.keep, or leave train.select out",
    ),
    (
        lambda c: (
            c.train.advantage.kind == "none"
            and (c.train.teacher is None or c.train.teacher.weights is not None)
        ),
        "train.advantage none ignores rewards, so the run needs a teacher other than version 0 of the "
        "policy: set train.teacher, or use train.advantage group",
    ),
    (
        _goes_by_idle_rewards,
        "rollout.gate, rollout.curriculum, train.select and train.loss.kl with `place: reward` use rewards, "
        "which have no effect with train.advantage none: leave these settings out",
    ),
    (
        lambda c: (
            (c.train.teacher is not None and c.train.teacher.url is not None)
            and (c.rollout.temperature, c.rollout.top_p, c.rollout.top_k, c.rollout.outside_groups)
            != (1, 1, 0, 0)
        ),
        "train.teacher.url gives log-probs at temperature 1 of the whole vocabulary: leave out "
        "rollout.temperature, top_p, top_k and outside_groups (external agents choose their own sampling), "
        "or set train.teacher.model instead of train.teacher.url",
    ),
    (
        lambda c: _num_kept(c) is not None and isinstance(c.train.advantage, Gae | Whitened | RoleBaseline),
        "train.advantage {c.train.advantage.kind} compares sessions of the whole batch, but train.select "
        "extremes keeps the best and the worst sessions of each group: use train.advantage group, or leave "
        "train.select out",
    ),
)
