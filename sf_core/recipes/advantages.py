"""Advantages: what `train.advantage` names."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from sf_core.recipes.outcomes import are_equal
from sf_core.recipes.samples import Component, Samples, Score, Turns, Values
from sf_core.settings import Reference, load_object, or_kind

EPSILON = 1e-6


class Advantage(Component):
    def __call__(self, samples: Samples) -> Values:
        """The advantage of every token; 0 where none is trained."""
        raise NotImplementedError


class NoAdvantage(Advantage):
    """The advantage of every token is 0. Rewards have no effect, and only `train.teacher` trains the
    policy."""

    kind: Literal["none"] = "none"

    def __call__(self, samples: Samples) -> Values:
        return samples.spread(np.zeros(len(samples.rewards)))


class Grpo(Advantage):
    """The reward of a session minus the mean reward of its group, divided by a standard deviation (GRPO, Shao
    et al. 2024, eq. 3)."""

    kind: Literal["group"] = "group"
    scale: Literal["group", "batch", "none"] = "group"
    """Standard deviation by which the advantage is divided. Before the division, the advantage is the reward
    minus the mean reward of the group. group: standard deviation of the rewards of the group. batch: standard
    deviation of all rewards of the batch. none: no division (Dr. GRPO, Liu et al. 2025)."""
    ddof: Literal[0, 1] = 1
    """Correction of the variance: the variance of n rewards is the sum of the squared deviations, divided by
    (n - ddof)."""

    def __call__(self, samples: Samples) -> Values:
        if self.scale == "group":
            return samples.spread(standard(samples.rewards, samples.groups, self.ddof))
        centred = centre(samples.rewards, samples.groups)
        if self.scale == "batch":
            centred /= deviation(samples.rewards, self.ddof) + EPSILON
        return samples.spread(centred)


class LeaveOneOut(Advantage):
    """The reward of a session minus the mean reward of the other sessions of its group (RLOO, Ahmadian et al.
    2024, eq. 8)."""

    kind: Literal["leave_one_out"] = "leave_one_out"

    def __call__(self, samples: Samples) -> Values:
        size = samples.group_size
        return samples.spread(centre(samples.rewards, samples.groups) * size / np.maximum(size - 1, 1))


class Relative(Advantage):
    """The reward of a session minus the mean reward of its group, divided by this mean (MaxRL, Tajwar et al.
    2026). Tasks that are rarely solved get more weight. Rewards must not be negative. If all rewards of a
    group are 0, all advantages of the group are 0."""

    kind: Literal["relative"] = "relative"

    def __call__(self, samples: Samples) -> Values:
        mean = samples.group_mean(samples.rewards)
        centred = centre(samples.rewards, samples.groups)
        return samples.spread(np.divide(centred, mean, where=mean > EPSILON, out=np.zeros_like(mean)))


class Whitened(Advantage):
    """The reward of a session, standardised over all trained tokens of the batch: the mean over the tokens is
    subtracted, and the difference is divided by the standard deviation over the tokens (REINFORCE++, Hu et
    al. 2025)."""

    kind: Literal["whitened"] = "whitened"
    baseline: bool = False
    """true: the mean reward of the group is subtracted from each reward before the standardisation
    (REINFORCE++-baseline)."""

    def __call__(self, samples: Samples) -> Values:
        centred = centre(samples.rewards, samples.groups)
        plain = samples.spread(centred if self.baseline else samples.rewards)
        return scale_to_batch(plain, samples)


class RoleBaseline(Advantage):
    """The reward of a session minus the mean reward of all sessions of the batch with the same role (SPIRAL,
    Liu et al. 2025, where the baseline is a moving average). The role is the name of the task's environment.
    Use this kind for games in which the players have different roles. It supports `rollout.group_size` 1."""

    kind: Literal["role_baseline"] = "role_baseline"

    def __call__(self, samples: Samples) -> Values:
        roles = np.unique(samples.environments, return_inverse=True)[1]
        return samples.spread(centre(samples.rewards, roles))


class TwoLevel(Advantage):
    """The sum of two standard scores (UI-S1, Lu et al. 2025). The first is the standard score of the
    session's reward in its group. The second, multiplied by `omega`, is the standard score of the turn's
    return. The return of a turn is the reward of the turn plus the discounted rewards of later turns. Returns
    are standardised among all turns of the group with the same turn number. The reward function can give a
    reward to each turn."""

    kind: Literal["two_level"] = "two_level"
    gamma: float = Field(0.5, ge=0, le=1)
    """Discount of the rewards of later turns, per turn."""
    omega: float = Field(1.0, ge=0)
    """Weight of the standard score of the turn's return. The standard score of the session's reward has the
    weight 1."""

    def __call__(self, samples: Samples) -> Values:
        turns = samples.turns
        masks = samples.masks
        returns = self._returns(turns)
        spans = list(zip(turns.rows, map(slice, turns.starts, turns.ends), strict=True))
        # a turn that several rows hold is trained in one of them, and counts once
        counts = np.array([masks[row][tokens].any() for row, tokens in spans], np.bool_)
        labels = np.stack([samples.groups[samples.sessions[turns.rows]], turns.steps])
        peers = np.unique(labels[:, counts], axis=1, return_inverse=True)[1].reshape(-1)
        scores = np.zeros(len(returns))
        scores[counts] = standard(returns[counts], peers, 1)
        advantages = [row.copy() for row in Grpo()(samples)]
        for (row, tokens), score in zip(spans, scores, strict=True):
            added = np.where(masks[row][tokens], np.float32(self.omega * score), 0)
            advantages[row][tokens] += added
        return advantages

    def _returns(self, turns: Turns) -> npt.NDArray[np.float64]:
        returns = turns.rewards.copy()
        for turn in range(len(returns) - 2, -1, -1):
            if turns.rows[turn] == turns.rows[turn + 1]:
                returns[turn] += self.gamma * returns[turn + 1]
        return returns


class Tree(Advantage):
    """Advantage for sessions with several branches (TRACE, arXiv 2606.11119). The reward of a branch is the
    reward of the session plus the rewards of the turns of the branch. Each branch gets the standard score of
    its reward among all branches of the group. Each token gets the mean score of the branches that contain
    the token. If sessions have one branch and turns have no rewards, this kind is equal to `group`."""

    kind: Literal["tree"] = "tree"

    def __call__(self, samples: Samples) -> Values:
        turns = samples.turns
        of_turns = np.bincount(turns.rows, weights=turns.rewards, minlength=len(samples.masks))
        rewards = samples.rewards[samples.sessions] + of_turns
        scores = standard(rewards, samples.groups[samples.sessions], 1)
        sums = [np.zeros(len(mask)) for mask in samples.masks]
        counts = [np.zeros(len(mask)) for mask in samples.masks]
        for leaf, score in enumerate(scores):
            row = leaf
            reach = len(samples.masks[leaf])
            while row >= 0:
                sums[row][:reach] += score
                counts[row][:reach] += 1
                row, reach = samples.parents[row], min(reach, samples.shared[row])
        advantages = []
        for score_sum, count, mask in zip(sums, counts, samples.masks, strict=True):
            mean = score_sum / np.maximum(count, 1)
            advantages.append(np.where(mask, mean, 0.0).astype(np.float32))
        return advantages


class Pair(Advantage):
    """Compares the best and the worst session of each group, with the loss

        (d_policy - ratio * d_reference - (1 - ratio) * d_sampled - 1 / (2 * eta)) ** 2

    where each d is the log-prob of the best session minus the log-prob of the worst session, summed over the
    tokens of the session. d_policy is computed under the policy, d_reference under the reference policy, and
    d_sampled under the policy that sampled. The loss is MNPO (arXiv 2509.23102) with the policy that sampled
    as the only past opponent; with ratio 1 it is IPO (Azar et al. 2024, eq. 17). The advantage of a token is
    the negative derivative of the loss with respect to the log-prob of the token. Other sessions of the group
    have no effect. Needs `train.loss.policy: plain` and one minibatch."""

    kind: Literal["pair"] = "pair"
    eta: float = Field(0.1, gt=0)
    """Inverse strength of the preference for the best session of a group. The smaller this value, the further
    training separates the log-probs of the best and the worst session."""
    ratio: float = Field(1 / 3, ge=0, le=1)
    """Weight of the reference policy in the loss (d_reference). The policy that sampled (d_sampled) has the
    weight 1 - ratio."""

    @property
    def needs(self) -> frozenset[Score]:
        return frozenset({"start", "reference"})

    def __call__(self, samples: Samples) -> Values:
        sums = [
            samples.session_sum(v)
            for v in (samples.scores["start"], samples.scores["reference"], samples.logprobs)
        ]
        gains = sums[0] - self.ratio * sums[1] - (1 - self.ratio) * sums[2]
        falls = np.zeros(len(samples.rewards))
        for group in range(samples.groups.max(initial=-1) + 1):
            members = np.flatnonzero(samples.groups == group)
            rewards = samples.rewards[members]
            best = members[rewards.argmax()]
            worst = members[rewards.argmin()]
            if not are_equal(samples.rewards[worst], samples.rewards[best]):
                error = gains[best] - gains[worst] - 1 / (2 * self.eta)
                falls[best] = -2 * error
                falls[worst] = 2 * error
        return samples.spread(falls)


class Gae(Advantage):
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16) over the trained tokens of each row.
    Tokens that the policy did not sample are skipped. The session's reward counts at the last token of the
    row, and the reward of a turn counts at the last token of the turn. Needs `train.critic`."""

    kind: Literal["gae"] = "gae"
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount of later rewards, per token."""
    lam: float = Field(0.95, ge=0, le=1)
    """The parameter lambda of the estimation: the weight of later tokens. 1: the advantage is the reward
    minus the value that the critic predicts at the token. 0: the advantage is the value at the next token
    minus the value at this token."""
    whiten: bool = True
    """true: the advantages are standardised over the trained tokens of the batch. The mean of these
    advantages is subtracted, and the difference is divided by their standard deviation."""

    @property
    def needs(self) -> frozenset[Score]:
        return frozenset({"values"})

    def __call__(self, samples: Samples) -> Values:
        plain = [row.astype(np.float32) for row in self._raw(samples)]
        return scale_to_batch(plain, samples) if self.whiten else plain

    def returns(self, samples: Samples) -> Values:
        """What the critic is taught to expect before each token."""
        values = samples.scores["values"]
        return [(a + v).astype(np.float32) for a, v in zip(self._raw(samples), values, strict=True)]

    def _raw(self, samples: Samples) -> list[npt.NDArray[np.float64]]:
        results = []
        steps = [np.zeros(len(mask)) for mask in samples.masks]
        turns = samples.turns
        for row, end, earned in zip(turns.rows, turns.ends, turns.rewards, strict=True):
            steps[row][end - 1] = earned
        rows = zip(samples.masks, samples.scores["values"], samples.sessions, steps, strict=True)
        for mask, values, session, earned_at in rows:
            advantages = np.zeros(len(mask))
            following = 0.0
            advantage = 0.0
            reward = samples.rewards[session]
            for token in np.flatnonzero(mask)[::-1]:
                surprise = reward + earned_at[token] + self.gamma * following - values[token]
                advantage = surprise + self.gamma * self.lam * advantage
                advantages[token] = advantage
                following = values[token]
                reward = 0.0
            results.append(advantages)
        return results


class CustomAdvantage(Advantage):
    """A Python function of your own."""

    kind: Literal["custom"] = "custom"
    function: Reference
    """Name of a Python function, as package.module:name. The function takes Samples (sf_core.recipes.samples)
    and returns one array per row, with the advantage of each token of the row. The function runs on the
    workers."""

    def __call__(self, samples: Samples) -> Values:
        return check_values(load_object(self.function)(samples), samples, f"train.advantage {self.function}")


# in the order in which the form tells them apart: those with few fields first
_WithFewFields = NoAdvantage | LeaveOneOut | Relative | RoleBaseline | Tree | Whitened
AnyAdvantage = Annotated[
    _WithFewFields | CustomAdvantage | TwoLevel | Pair | Grpo | Gae,
    Field(discriminator="kind"),
    or_kind("group"),
]


def scale_to_batch(values: Values, samples: Samples) -> Values:
    """Less the mean over all trained tokens, and over their standard deviation; 0 where none is trained."""
    tokens = samples.select_trained(values)
    mean = tokens.mean() if tokens.size else 0.0
    scale = deviation(tokens, 1) + EPSILON if tokens.size else 1.0
    return [
        np.where(mask, (row - mean) / scale, 0.0).astype(np.float32)
        for row, mask in zip(values, samples.masks, strict=True)
    ]


def centre(values: npt.NDArray[np.float64], sets: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Each value minus the mean of its set, which is told by its number; exactly 0 where the two differ by
    rounding only, which must not be scaled up."""
    sizes = np.maximum(np.bincount(sets), 1)
    means = np.bincount(sets, weights=values) / sizes
    mean = means[sets]
    is_mean = are_equal(np.minimum(values, mean), np.maximum(values, mean))
    return np.where(is_mean, 0.0, values - mean)


def standard(
    values: npt.NDArray[np.float64], sets: npt.NDArray[np.int64], ddof: int
) -> npt.NDArray[np.float64]:
    """Each value minus the mean of its set, over the set's standard deviation."""
    centred = centre(values, sets)
    sizes = np.bincount(sets)
    variance = np.bincount(sets, weights=centred**2)[sets] / np.maximum(sizes - ddof, 1)[sets]
    return np.asarray(centred / (np.sqrt(variance) + EPSILON))


def deviation(values: npt.NDArray[np.float64], ddof: int) -> float:
    """Standard deviation; 0 of fewer values than it takes."""
    return float(values.std(ddof=ddof)) if values.size > ddof else 0.0


def check_values(values: Values, samples: Samples, source: str) -> Values:
    """What a user's function returned, 0 where nothing is trained. Raises ValueError if it has not one finite
    number for every token of every row."""
    rows = [np.asarray(row, dtype=np.float32) for row in values]
    if [row.shape for row in rows] != [mask.shape for mask in samples.masks]:
        raise ValueError(f"{source}: expected one number per token for each of {len(samples.masks)} rows")
    checked = []
    for number, (row, mask) in enumerate(zip(rows, samples.masks, strict=True)):
        if not np.isfinite(row[mask]).all():
            raise ValueError(f"{source}: the number for a trained token of row {number} is not finite")
        checked.append(np.where(mask, row, np.float32(0)))
    return checked
