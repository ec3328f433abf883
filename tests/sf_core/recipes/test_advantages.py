import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sf_core.recipes.advantages import (
    EPSILON,
    Advantage,
    CustomAdvantage,
    Gae,
    Grpo,
    LeaveOneOut,
    Pair,
    Relative,
    RoleBaseline,
    Tree,
    TwoLevel,
    Whitened,
    deviation,
)
from sf_core.recipes.outcomes import ABSOLUTE, RELATIVE, are_equal
from sf_core.recipes.samples import Samples
from tests.bench.closeness import assert_rounded
from tests.sf_core.recipes import batches

sessions = st.lists(st.tuples(st.floats(-10, 10, width=32), st.integers(0, 4)), min_size=1, max_size=40)


def advantages(advantage: Advantage, rewards: Any, groups: Any) -> np.ndarray:
    return batches.of_sessions(advantage(batches.samples(rewards, groups)))


def nearly_zero(rewards: np.ndarray) -> float:
    """The largest difference from a mean that counts as none."""
    return float(ABSOLUTE + RELATIVE * np.abs(rewards).max())


def by_group(values: np.ndarray, groups: np.ndarray) -> list[np.ndarray]:
    return [values[groups == group] for group in np.unique(groups)]


@pytest.mark.parametrize(
    ("advantage", "scale"),
    [
        (Grpo(), lambda own, _: deviation(own, 1) + EPSILON),
        (Grpo(ddof=0), lambda own, _: deviation(own, 0) + EPSILON),
        (Grpo(scale="none"), lambda own, _: 1.0),
        (Grpo(scale="batch"), lambda _, every: deviation(every, 1) + EPSILON),
        (LeaveOneOut(), lambda own, _: (own.size - 1) / own.size or 1.0),
    ],
)
@given(drawn=sessions)
def test_advantages_of_a_group_sum_to_zero(
    advantage: Advantage, scale: Callable[[np.ndarray, np.ndarray], float], drawn: list[tuple[float, int]]
) -> None:
    rewards, groups = (np.array(column, np.float64) for column in zip(*drawn, strict=True))
    found = advantages(advantage, rewards, groups).astype(np.float64)
    for own, group in zip(by_group(rewards, groups), by_group(found, groups), strict=True):
        rounded = np.finfo(np.float32).eps * np.abs(group).sum()
        assert abs(group.sum()) <= rounded + own.size * nearly_zero(rewards) / scale(own, rewards)


@pytest.mark.parametrize("ddof", [0, 1])
@given(drawn=sessions)
def test_scaled_advantages_have_deviation_one_or_less_where_rewards_hardly_differ(
    ddof: int, drawn: list[tuple[float, int]]
) -> None:
    rewards, groups = (np.array(column, np.float64) for column in zip(*drawn, strict=True))
    found = advantages(Grpo(ddof=ddof), rewards, groups)  # type: ignore[arg-type]
    for given_to, group in zip(by_group(rewards, groups), by_group(found, groups), strict=True):
        if group.size > ddof:
            spread = given_to.std(ddof=ddof)
            scale = spread + EPSILON
            bound = 4 * (np.finfo(np.float32).eps + nearly_zero(rewards) / scale)
            assert abs(group.astype(np.float64).std(ddof=ddof) - spread / scale) <= bound


@given(sessions)
def test_with_the_deviation_of_n_it_is_what_earlier_versions_computed_bit_for_bit(
    drawn: list[tuple[float, int]],
) -> None:
    rewards, groups = (np.array(column, np.float64) for column in zip(*drawn, strict=True))
    _, group = np.unique(groups, return_inverse=True)
    sizes = np.bincount(group)
    mean = (np.bincount(group, weights=rewards) / sizes)[group]
    centred = np.where(are_equal(np.minimum(rewards, mean), np.maximum(rewards, mean)), 0.0, rewards - mean)
    deviation = np.sqrt(np.bincount(group, weights=centred**2) / sizes)
    former = (centred / (deviation[group] + EPSILON)).astype(np.float32)
    np.testing.assert_array_equal(advantages(Grpo(ddof=0), rewards, groups), former)


def test_by_hand() -> None:
    rewards = [1.0, 0.0, 0.0, 2.0, 6.0, 4.0]
    groups = [0, 0, 0, 1, 1, 1]
    third = math.sqrt(1 / 3)
    spread = 2.0
    by_kind: dict[Advantage, list[float]] = {
        Grpo(): [2 / 3 / third, -1 / 3 / third, -1 / 3 / third, -2 / spread, 2 / spread, 0],
        Grpo(scale="none"): [2 / 3, -1 / 3, -1 / 3, -2, 2, 0],
        LeaveOneOut(): [1, -0.5, -0.5, -3, 3, 0],
        Relative(): [2, -1, -1, -0.5, 0.5, 0],
    }
    deviation = np.std(rewards, ddof=1)
    by_kind[Grpo(scale="batch")] = [x / deviation for x in by_kind[Grpo(scale="none")]]
    tokens = np.repeat(rewards, 2)
    by_kind[Whitened()] = [(r - tokens.mean()) / tokens.std(ddof=1) for r in rewards]
    centred = np.repeat(by_kind[Grpo(scale="none")], 2)
    by_kind[Whitened(baseline=True)] = [x / centred.std(ddof=1) for x in by_kind[Grpo(scale="none")]]
    for advantage, expected in by_kind.items():
        np.testing.assert_allclose(advantages(advantage, rewards, groups), expected, atol=1e-5)


@given(sessions, st.floats(-5, 5, width=32))
def test_a_constant_added_to_all_rewards_changes_nothing(
    drawn: list[tuple[float, int]], constant: float
) -> None:
    rewards, groups = (np.array(column, np.float64) for column in zip(*drawn, strict=True))
    # of advantages up to twice as large as the reward minus the mean of all
    counts_as_none = 2 * nearly_zero(np.abs(rewards) + abs(constant))
    for advantage in (Grpo(scale="none"), LeaveOneOut()):
        plain, shifted = (advantages(advantage, r, groups) for r in (rewards, rewards + constant))
        np.testing.assert_allclose(plain, shifted, rtol=2 * np.finfo(np.float32).eps, atol=counts_as_none)


def test_equal_rewards_give_exact_zeros_in_spite_of_rounding() -> None:
    for advantage in (Grpo(), Grpo(scale="none"), LeaveOneOut(), Relative()):
        assert not advantages(advantage, [0.1] * 7, [0] * 7).any()
        assert not advantages(advantage, [0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1], [0, 0]).any()


def test_a_reward_that_is_the_mean_of_its_group_gives_exactly_zero() -> None:
    assert (advantages(Grpo(), [0.1, 0.2, 0.3], [0] * 3) == 0).tolist() == [False, True, False]


def test_a_group_that_earned_nothing_is_relative_to_nothing() -> None:
    assert advantages(Relative(), [0.0, 0.0, 1.0, 0.0], [0, 0, 1, 1]).tolist() == [0, 0, 1, -1]


@pytest.mark.parametrize(
    "advantage",
    [
        Grpo(),
        LeaveOneOut(),
        Relative(),
        Whitened(),
        Whitened(baseline=True),
        RoleBaseline(),
        TwoLevel(),
        Tree(),
    ],
)
def test_a_single_session_and_a_batch_of_none_are_no_error(advantage: Advantage) -> None:
    assert np.isfinite(advantages(advantage, [3.0], [0])).all()
    masks = [np.zeros(3, np.bool_)]
    assert not np.any(advantage(batches.samples([3.0], [0], masks=masks)))


def test_branches_of_a_session_neither_move_the_mean_of_their_group_nor_widen_it() -> None:
    three = {"masks": [np.array([False, True, True])] * 6, "versions": [np.zeros(3, np.int32)] * 6}
    drawn = batches.samples(
        [3.0, 1.0, 5.0, 5.0], [7, 7, 2, 2], sessions=np.array([0, 0, 0, 1, 2, 3]), **three
    )
    assert batches.of_sessions(Grpo(scale="none")(drawn)).tolist() == [1.0, 1.0, 1.0, -1.0, 0.0, 0.0]


def test_a_role_is_compared_with_itself_over_all_groups() -> None:
    environments = ["first", "second", "first", "second"]
    drawn = batches.samples([1.0, 0.0, 0.5, 0.5], [0, 1, 2, 3], environments=environments)
    assert batches.of_sessions(RoleBaseline()(drawn)).tolist() == [0.25, -0.25, -0.25, 0.25]


def test_turns_are_compared_by_their_number_in_what_they_earned_from_there_on() -> None:
    masks = [np.array([False, True, False, True, True])] * 5
    answers = [(row, at, at + 1 + (at > 1), reward) for row, at, reward in STEPS]
    versions = {"masks": masks, "versions": [np.zeros(5, np.int32)] * 5}
    drawn = batches.samples(
        [2.0, 1.0, 0.0, 9.0, 9.0], [0, 0, 0, 1, 1], turns=batches.turns(*answers), **versions
    )
    found = np.array(TwoLevel(gamma=0.5, omega=2.0)(drawn))
    assert np.array_equal(found[3] != 0, masks[3]) and np.array_equal(found[3], -found[4])
    found = found[:3]
    episode = np.array([1.0, 0.0, -1.0])
    firsts = np.array([1 + 0.5 * 4, 1.0, 1 + 0.5 * 2])
    seconds = np.array([4.0, 0.0, 2.0])
    for token, returns in ((1, firsts), (3, seconds), (4, seconds)):
        expected = episode + 2.0 * (returns - returns.mean()) / returns.std(ddof=1)
        np.testing.assert_allclose(found[:, token], expected, atol=1e-4)
    assert not found[:, [0, 2]].any()


STEPS = [
    *((0, 1, 1.0), (0, 3, 4.0), (1, 1, 1.0), (1, 3, 0.0), (2, 1, 1.0), (2, 3, 2.0)),
    *((3, 1, 7.0), (3, 3, 8.0), (4, 1, 5.0), (4, 3, 7.0)),
]
"""Row, place and reward of two turns of each of five rows."""


def test_a_turn_that_two_branches_hold_counts_once_among_its_peers() -> None:
    first = np.array([True, True, False])
    fork = np.array([False, False, True])
    shared = {"sessions": np.array([0, 0, 1]), "masks": [first, fork, first]}
    answers = batches.turns((0, 0, 1, 3.0), (0, 1, 2, 0.0), (1, 0, 1, 3.0), (1, 2, 3, 0.0), (2, 0, 1, 1.0))
    drawn = batches.samples([1.0, 1.0], [0, 0], turns=answers, versions=[np.zeros(3, np.int32)] * 3, **shared)
    found = TwoLevel()(drawn)
    np.testing.assert_allclose(found, [[0.5**0.5, 0, 0], [0, 0, 0], [-(0.5**0.5), 0, 0]], atol=1e-5)


@given(st.data())
def test_what_branches_share_earns_the_mean_of_all_that_hold_it(data: st.DataObject) -> None:
    """Random trees: each row copies a prefix of an earlier row of its session."""
    sessions = []
    tokens = []
    masks = []
    parents = []
    shared = []
    for row in range(data.draw(st.integers(1, 7))):
        length = data.draw(st.integers(1, 6))
        parent = data.draw(st.integers(-1, row - 1))
        prefix = 0 if parent < 0 else data.draw(st.integers(0, min(len(tokens[parent]), length)))
        parents.append(parent)
        shared.append(prefix)
        sessions.append(len(set(sessions)) if parent < 0 else sessions[parent])
        known = [] if parent < 0 else tokens[parent][:prefix]
        tokens.append([*known, *((row, at) for at in range(prefix, length))])
        masks.append(np.arange(length) >= prefix)
    size = len(set(sessions))
    rewards = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    steps = data.draw(st.lists(st.integers(0, 3), min_size=len(masks), max_size=len(masks)))
    drawn = batches.samples(
        rewards,
        [0] * size,
        sessions=np.array(sessions),
        masks=masks,
        parents=np.array(parents),
        shared=np.array(shared),
        turns=batches.turns(*((row, 0, 1, earned) for row, earned in enumerate(steps))),
    )
    leaves = np.array([rewards[session] + step for session, step in zip(sessions, steps, strict=True)])
    scores = (leaves - leaves.mean()) / (deviation(leaves, 1) + EPSILON)
    for row, found in enumerate(Tree()(drawn)):
        for at in np.flatnonzero(masks[row]):
            holders = [tokens[row][at] in other for other in tokens]
            assert_rounded(found[at], scores[holders].mean(), 2, scale=np.abs(scores).max())
        assert not found[~masks[row]].any()


@given(sessions)
def test_without_branches_a_tree_is_a_group(drawn: list[tuple[float, int]]) -> None:
    rewards, groups = (np.array(column, np.float64) for column in zip(*drawn, strict=True))
    np.testing.assert_array_equal(advantages(Tree(), rewards, groups), advantages(Grpo(), rewards, groups))


@given(
    st.lists(st.tuples(*[st.floats(-2, 0, width=32)] * 3), min_size=8, max_size=8),
    st.sampled_from([0.0, 1 / 3, 1.0]),
)
def test_a_pair_has_the_gradient_of_the_pairwise_loss(drawn: list[tuple[float, ...]], ratio: float) -> None:
    policy, reference, sampled = (torch.tensor(column).reshape(4, 2) for column in zip(*drawn, strict=True))
    policy.requires_grad_()
    best = 2
    worst = 1
    eta = 0.5
    of_policy, of_reference, of_sampled = (
        t[best].double().sum() - t[worst].double().sum() for t in (policy, reference, sampled)
    )
    loss = (of_policy - ratio * of_reference - (1 - ratio) * of_sampled - 1 / (2 * eta)) ** 2
    (gradient,) = torch.autograd.grad(loss, policy)

    def rows(values: torch.Tensor) -> list[np.ndarray]:
        return [np.array([9.0, *row], np.float32) for row in values.detach().numpy()]

    scores = {"start": rows(policy), "reference": rows(reference)}
    given_to = batches.samples([0.5, 0.0, 1.0, 0.0], [0, 0, 0, 0], scores=scores, logprobs=rows(sampled))
    found = batches.of_sessions(Pair(eta=eta, ratio=ratio)(given_to))
    terms = [abs(float(term)) for term in (of_policy, of_reference, of_sampled)]
    assert_rounded(found, -gradient[:, 0], 2, scale=2 * max(*terms, 1 / (2 * eta)))


def test_a_group_of_equal_rewards_is_no_pair() -> None:
    scores = {"start": [np.zeros(3, np.float32)] * 2, "reference": [np.zeros(3, np.float32)] * 2}
    assert not np.any(Pair()(batches.samples([1.0, 1.0], [0, 0], scores=scores)))


def naive_gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Each advantage as the sum of the discounted differences after it."""
    following = [*values[1:], 0.0]
    steps = [r + gamma * v - own for r, v, own in zip(rewards, following, values, strict=True)]
    return [
        sum((gamma * lam) ** (later - token) * steps[later] for later in range(token, len(steps)))
        for token in range(len(steps))
    ]


@given(
    st.lists(st.tuples(st.booleans(), st.floats(-2, 2, width=32)), min_size=1, max_size=10),
    st.sampled_from([1.0, 0.9]),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.floats(-2, 2, width=32),
)
def test_gae_goes_over_trained_tokens_alone(
    tokens: list[tuple[bool, float]], gamma: float, lam: float, step: float
) -> None:
    mask = np.array([m for m, _ in tokens])
    values = np.array([v for _, v in tokens], np.float32)
    scores = {"values": [np.where(mask, values, 0).astype(np.float32)]}
    answer = batches.turns((0, 0, (mask.argmax() if mask.any() else 0) + 1, step))
    drawn = batches.samples([1.5], [0], masks=[mask], scores=scores, turns=answer)
    gae = Gae(gamma=gamma, lam=lam, whiten=False)
    own = values[mask].astype(float).tolist()
    rewards = np.array([0.0] * (len(own) - 1) + [1.5])
    rewards[0] += step
    expected = naive_gae(rewards.tolist(), own, gamma, lam) if own else []
    (found,) = gae(drawn)
    (returns,) = gae.returns(drawn)
    size = np.abs([1.5, *expected]).max()
    assert_rounded(found[mask], expected, 2, scale=size)
    assert not found[~mask].any()
    assert_rounded(returns[mask], [a + v for a, v in zip(expected, own, strict=True)], 2, scale=size + 2)


def test_gae_is_whitened_over_the_tokens_of_the_batch_and_returns_are_not() -> None:
    scores = {"values": [np.array([0, 0.5, 1.0], np.float32), np.array([0, -0.5, 0.0], np.float32)]}
    drawn = batches.samples([1.0, 3.0], [0, 1], scores=scores)
    found = np.concatenate([row[1:] for row in Gae(lam=1.0)(drawn)])
    raw = np.array([0.5, 0.0, 3.5, 3.0])
    np.testing.assert_allclose(found, (raw - raw.mean()) / raw.std(ddof=1), atol=1e-5)
    assert [row[1:].tolist() for row in Gae(lam=1.0).returns(drawn)] == [[1.0, 1.0], [3.0, 3.0]]


def twice_the_reward(drawn: Samples) -> list[np.ndarray]:
    return [np.full(len(mask), 2 * reward) for mask, reward in zip(drawn.masks, drawn.rewards, strict=True)]


def too_few(drawn: Samples) -> list[np.ndarray]:
    return twice_the_reward(drawn)[1:]


def not_a_number(drawn: Samples) -> list[np.ndarray]:
    return [row * math.nan for row in twice_the_reward(drawn)]


def test_a_function_of_the_users_gives_advantages_and_what_it_must_not_give_is_refused() -> None:
    def custom(name: str) -> CustomAdvantage:
        return CustomAdvantage(function=f"tests.sf_core.recipes.test_advantages:{name}")

    assert advantages(custom("twice_the_reward"), [1.0, 3.0], [0, 0]).tolist() == [2.0, 6.0]
    with pytest.raises(ValueError, match="expected one number per token for each of 2 rows"):
        advantages(custom("too_few"), [1.0, 3.0], [0, 0])
    with pytest.raises(
        ValueError, match=r"not_a_number: the number for a trained token of row 0 is not finite"
    ):
        advantages(custom("not_a_number"), [1.0, 3.0], [0, 0])
