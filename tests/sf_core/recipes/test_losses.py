import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from sf_core.recipes.losses import (
    Cispo,
    Clip,
    Correction,
    Critic,
    Kl,
    M2po,
    Plain,
    PolicyLoss,
    SequenceClip,
    Tokens,
    mean_over,
)

SETTINGS = Clip(low=0.2, high=0.28, cap=3.0)

caps = st.floats(1, 6)
drawn_tokens = st.lists(
    st.tuples(st.floats(-6, -0.01), st.floats(-6, -0.01), st.floats(-2, 2)), min_size=1, max_size=10
)


def tokens(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, row: list[int] | None = None
) -> Tokens:
    rows = [0] * len(logprobs) if row is None else row
    return Tokens(logprobs, old, advantages, torch.tensor(rows), max(rows) + 1)


def columns(drawn: list[tuple[float, float, float]]) -> list[torch.Tensor]:
    return [torch.tensor(column, dtype=torch.float64) for column in zip(*drawn, strict=True)]


def gradient(loss: PolicyLoss, found: Tokens) -> torch.Tensor:
    """d loss / d log-prob of each token."""
    logprobs = found.logprobs.clone().requires_grad_()
    (result,) = torch.autograd.grad(
        loss(Tokens(logprobs, found.old, found.advantages, found.row, found.num_rows)).sum(), logprobs
    )
    return result


def clip_gradient(logprob: float, old: float, advantage: float, cap: float) -> float:
    """From the definition."""
    ratio = math.exp(logprob - old)
    if (advantage > 0 and ratio > 1.28) or (advantage < 0 and ratio < 0.8):
        return 0.0
    return -min(ratio, cap) * advantage


@given(drawn_tokens, caps)
@example([(-1.0, -2.0, -1.0)], 1.0)  # the cap truncates what the clip would spare
def test_the_gradient_of_clip_agrees_with_a_naive_reference(
    drawn: list[tuple[float, float, float]], cap: float
) -> None:
    found = gradient(SETTINGS.model_copy(update={"cap": cap}), tokens(*columns(drawn)))
    expected = [clip_gradient(*token, cap) for token in drawn]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_beyond_a_dual_cap_a_token_has_the_loss_of_the_cap_and_no_gradient() -> None:
    loss = Clip(cap=3.0, beyond="dual")
    far = tokens(torch.tensor([-1.0, -1.0]), torch.tensor([-3.0, -3.0]), torch.tensor([-2.0, 2.0]))
    assert loss(far).tolist() == [6.0, pytest.approx(-1.28 * 2)]
    assert gradient(loss, far).tolist() == [0.0, 0.0]
    near = tokens(torch.tensor([-1.0]), torch.tensor([-2.0]), torch.tensor([-2.0]))
    assert gradient(loss, near).tolist() == [pytest.approx(2 * math.e)]


@pytest.mark.parametrize("loss", [SETTINGS, Clip(cap=None), SequenceClip()])
def test_on_policy_the_loss_is_minus_the_advantage(loss: PolicyLoss) -> None:
    logprobs = torch.tensor([-1.0, -2.0])
    advantages = torch.tensor([0.5, -1.5])
    same = tokens(logprobs, logprobs, advantages)
    assert loss(same).tolist() == [-0.5, 1.5]
    assert gradient(loss, same).tolist() == [-0.5, 1.5]
    assert [part.any().item() for part in loss.find_bounded(same)] == [False, False]


@pytest.mark.parametrize("loss", [SETTINGS, Clip(cap=3, beyond="dual"), SequenceClip(), Cispo(), Plain()])
def test_a_token_far_from_its_behaviour_policy_keeps_loss_and_gradient_finite(loss: PolicyLoss) -> None:
    far = tokens(torch.tensor([-0.1, -500.0]), torch.tensor([-500.0, -0.1]), torch.tensor([-1.0, 1.0]))
    assert loss(far).isfinite().all() and gradient(loss, far).isfinite().all()


def test_bounded_marks_the_tokens_without_gradient() -> None:
    found = tokens(
        torch.tensor([-1.0, -1.0, -2.0, -2.0]),
        torch.tensor([-2.0, -2.0, -1.0, -1.0]),
        torch.tensor([1.0, -1.0, 1.0, -1.0]),
    )
    low, high = SETTINGS.find_bounded(found)
    assert (low.tolist(), high.tolist()) == ([False, False, False, True], [True, False, False, False])
    assert (gradient(SETTINGS, found) == 0).tolist() == (low | high).tolist()


def test_a_sequences_ratio_is_the_geometric_mean_of_its_tokens_and_each_has_its_share_of_the_gradient() -> (
    None
):
    loss = SequenceClip(low=0.5, high=0.5)
    found = tokens(
        torch.tensor([-1.0, -1.2, -3.0], dtype=torch.float64),
        torch.tensor([-1.2, -1.2, -1.0], dtype=torch.float64),
        torch.tensor([2.0, 2.0, -1.0], dtype=torch.float64),
        [0, 0, 1],
    )
    first = math.exp(0.1)
    assert loss(found).tolist() == pytest.approx([-2 * first, -2 * first, 0.5])
    assert gradient(loss, found).tolist() == pytest.approx([-2 * first, -2 * first, 0.0])
    low, high = loss.find_bounded(found)
    assert (low.tolist(), high.tolist()) == ([False, False, True], [False] * 3)


def test_cispo_weighs_the_gradient_of_every_token_by_its_bounded_ratio() -> None:
    found = tokens(
        torch.tensor([-1.0, -1.0, -3.0]), torch.tensor([-2.0, -1.0, -1.0]), torch.tensor([1.0, -2.0, 1.0])
    )
    assert gradient(Cispo(high=0.5), found).tolist() == pytest.approx([-1.5, 2.0, -math.exp(-2)])
    assert [part.tolist() for part in Cispo(high=0.5).find_bounded(found)] == [
        [False] * 3,
        [True, False, False],
    ]


def test_plain_has_no_ratio() -> None:
    found = tokens(torch.tensor([-1.0, -1.0]), torch.tensor([-2.0, -9.0]), torch.tensor([1.0, -2.0]))
    assert gradient(Plain(), found).tolist() == [-1.0, 2.0]


def brute_force_bound(log_ratios: list[float], advantages: list[float], budget: float) -> float | None:
    """Drop the largest of those that clipping could bind until the mean is within the budget. The bound is in
    the middle between the largest that stays and the last that was dropped."""
    squares = sorted(r * r for r, a in zip(log_ratios, advantages, strict=True) if r * a > 0)
    whole = len(squares)
    while squares and sum(squares) / len(squares) > budget:
        dropped = squares.pop()
    if len(squares) == whole:
        return None
    return (math.sqrt(squares[-1]) + math.sqrt(dropped)) / 2 if squares else 0.0


@given(
    st.lists(st.tuples(st.floats(-2, 2), st.sampled_from([-1.0, 0.0, 1.0])), max_size=30), st.floats(0.001, 1)
)
def test_m2po_bounds_the_second_moment_of_the_log_ratio(
    drawn: list[tuple[float, float]], budget: float
) -> None:
    log_ratios = [r for r, _ in drawn]
    advantages = [a for _, a in drawn]
    squares = np.sort([r * r for r, a in drawn if r * a > 0])
    # where a mean is the budget but for rounding, either decision is right
    assume((np.abs(np.cumsum(squares) / np.arange(1, len(squares) + 1) - budget) > 1e-12).all())
    fitted = M2po(budget=budget).fit(np.array(log_ratios), np.array(advantages))
    assert isinstance(fitted, Clip)
    bound = brute_force_bound(log_ratios, advantages, budget)
    if bound is None:
        assert fitted.low == 1.0 and fitted.high > 1e8
    else:
        assert 1 + fitted.high == pytest.approx(math.exp(bound))
        assert 1 - fitted.low == pytest.approx(math.exp(-bound))


@given(drawn_tokens)
def test_k3_is_never_negative(drawn: list[tuple[float, float, float]]) -> None:
    logprobs, reference, _ = columns(drawn)
    assert (Kl(coefficient=1.0)(logprobs, reference) >= -1e-12).all()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_estimates_agree_where_policies_nearly_do_and_their_mean_is_the_divergence(estimator: str) -> None:
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    reference = torch.tensor([0.45, 0.33, 0.22], dtype=torch.float64).log()
    kl = Kl(coefficient=1.0, estimator=estimator)  # type: ignore[arg-type]
    exact = float((policy.exp() * (policy - reference)).sum())
    found = float((policy.exp() * kl(policy, reference)).sum())
    assert found == pytest.approx(exact, rel=1e-9 if estimator != "k2" else 0.05)


@given(
    st.integers(2, 6).flatmap(
        lambda ids: st.tuples(*[st.lists(st.floats(-3, 3), min_size=ids, max_size=ids)] * 2)
    )
)
def test_the_gradient_of_each_estimate_in_the_loss_is_the_one_that_its_setting_names(
    drawn: tuple[list[float], list[float]],
) -> None:
    """The mean over all tokens that the policy may sample, in float64, against the exact divergences."""
    logits = torch.tensor(drawn[0], dtype=torch.float64, requires_grad=True)
    policy = logits.log_softmax(0)
    reference = torch.tensor(drawn[1], dtype=torch.float64).log_softmax(0)

    def of(loss: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(loss, logits, retain_graph=True)[0]

    exact = of((policy.exp() * (policy - reference)).sum())
    other_way = of((reference.exp() * (reference - policy)).sum())
    # sampling has no gradient: a token counts as often as it is sampled
    found = {
        name: of((policy.detach().exp() * Kl(coefficient=1.0, estimator=name)(policy, reference)).sum())
        for name in ("k1", "k2", "k3")
    }
    torch.testing.assert_close(found["k2"], exact)
    torch.testing.assert_close(found["k3"], other_way)
    torch.testing.assert_close(found["k1"], torch.zeros_like(exact))


def test_a_reference_is_renewed_every_so_many_versions() -> None:
    assert [Kl(coefficient=1.0).version(step) for step in range(4)] == [0] * 4
    renewed = Kl(coefficient=1.0, renew_every=3)
    assert [renewed.version(step) for step in range(8)] == [0, 0, 0, 3, 3, 3, 6, 6]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [math.e**-1, 1.0, 2.0]),
        ({"cap": 8.0}, [math.e**-1, 1.0, math.e**2]),
        ({"beyond": "mask"}, [math.e**-1, 1.0, 0.0]),
        ({"level": "row"}, [2.0] * 3),
        ({"level": "row", "cap": 3.0}, [math.e] * 3),
        ({"level": "row", "beyond": "mask"}, [0.0] * 3),
    ],
)
def test_a_correction_is_the_ratio_up_to_its_cap(settings: dict[str, object], expected: list[float]) -> None:
    behaviour = np.array([-1.0, -1.0, -2.0], np.float32)
    start = behaviour + np.array([-1.0, 0.0, 2.0], np.float32)
    assert Correction.model_validate(settings)(start, behaviour).tolist() == pytest.approx(expected)


def test_a_value_that_has_moved_too_far_has_no_gradient_but_where_it_is_worse() -> None:
    before = torch.zeros(4)
    returns = torch.tensor([1.0, 1.0, -1.0, 0.1])
    values = torch.tensor([0.1, 0.5, 0.5, 0.3], requires_grad=True)
    loss = Critic(clip=0.2)(values, before, returns)
    assert loss.tolist() == pytest.approx([0.405, 0.32, 1.125, 0.02])
    loss.sum().backward()
    assert values.grad is not None and values.grad.tolist() == pytest.approx([-0.9, 0.0, 1.5, 0.2])
    assert Critic(clip=None)(values, before, returns).tolist() == pytest.approx([0.405, 0.125, 1.125, 0.02])


rows_of_units = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=12)


@given(rows_of_units, st.sampled_from(["token", "unit", "constant"]))
def test_the_mean_is_that_over_units_whatever_their_rows(drawn: list[tuple[int, int]], over: str) -> None:
    """Against the definition, with a value for every token."""
    random = np.random.default_rng(0)
    values = [random.normal(size=length) for length, _ in drawn]
    lengths = np.array([float(length) for length, _ in drawn])
    units = np.array([unit for _, unit in drawn])
    factors, total = mean_over(
        lengths, None if over == "token" else [str(unit) for unit in units], 7 if over == "constant" else None
    )
    found = sum(f * v.sum() for f, v in zip(factors, values, strict=True))
    of_units = {u: np.concatenate([v for v, o in zip(values, units, strict=True) if o == u]) for u in units}
    if over == "token":
        assert total == lengths.sum() and found == pytest.approx(sum(v.sum() for v in values))
    elif over == "constant":
        assert found / total == pytest.approx(sum(v.sum() for v in of_units.values()) / (7 * len(of_units)))
    else:
        means = [v.mean() for v in of_units.values() if v.size]
        assert total == len(means) and found == pytest.approx(sum(means))


@pytest.mark.parametrize(
    "make",
    [
        lambda: SequenceClip(low=0.3, high=0.3),
        lambda: Cispo(high=0.3),
        lambda: Clip(cap=2.0),
        lambda: Clip(cap=2.0, beyond="dual"),
        lambda: Clip(cap=None),
        lambda: Plain(),
    ],
)
def test_a_loss_does_not_depend_on_other_rows(make: Callable[[], PolicyLoss]) -> None:
    random = torch.Generator().manual_seed(0)
    logprobs, old, advantages = (torch.randn(12, generator=random, dtype=torch.float64) for _ in range(3))
    row = [0] * 5 + [1] * 4 + [2] * 3
    loss = make()
    together = loss(tokens(logprobs, old, advantages, row)).tolist()
    places = [range(5), range(5, 9), range(9, 12)]
    alone = [loss(tokens(logprobs[[*i]], old[[*i]], advantages[[*i]])).tolist() for i in places]
    assert together == pytest.approx([x for part in alone for x in part])
