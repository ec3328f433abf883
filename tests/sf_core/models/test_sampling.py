import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sf_core.models import scoring
from sf_core.models.counter import uniforms
from sf_core.models.sampling import sample
from tests.bench.closeness import assert_rounded
from tests.bench.properties import examples


def draw(
    logits: torch.Tensor, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    n = len(logits)
    return sample(
        logits,
        np.full(n, temperature, np.float32),
        np.full(n, top_p, np.float32),
        np.full(n, top_k),
        uniforms(seed, np.arange(n)),
    )


def score(
    logits: torch.Tensor, tokens: np.ndarray, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0
) -> torch.Tensor:
    n = len(logits)
    logprobs, _ = scoring.score(
        logits,
        None,
        torch.from_numpy(tokens),
        np.full(n, temperature, np.float32),
        np.full(n, top_p, np.float32),
        np.full(n, top_k),
    )
    return logprobs


def test_uniforms_depend_on_key_and_counter_only() -> None:
    together = uniforms(np.array([3, 2**64 - 1], np.uint64), [5, 9])
    assert together.tolist() == [uniforms(3, 5)[0], uniforms(2**64 - 1, 9)[0]]


def test_uniforms_are_uniform_over_counters_and_over_neighbouring_keys() -> None:
    for u in (uniforms(1, np.arange(100_000)), uniforms(np.arange(100_000), 0)):
        assert u.min() >= 0 and u.max() < 1
        counts = np.histogram(u, bins=50, range=(0, 1))[0]
        assert ((counts - 2000) ** 2 / 2000).sum() < 90  # chi-square, 49 degrees of freedom: p < 0.001
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.02


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1, 1, 0), (0.7, 1, 0), (1.5, 0.8, 0), (1, 1, 3)]
)
def test_tokens_follow_the_distribution_their_logprobs_state(
    temperature: float, top_p: float, top_k: int
) -> None:
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -torch.inf]).expand(50_000, 6)
    tokens, logprobs = draw(logits, temperature, top_p, top_k)
    support = np.unique(tokens)
    probs = np.exp([logprobs[tokens == token][0] for token in support])
    assert probs.sum() == pytest.approx(1, abs=1e-5)
    np.testing.assert_allclose(np.bincount(tokens)[support] / 50_000, probs, atol=0.01)


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().expand(2000, 4)
    for top_p, kept in [(0.39, 1), (0.5, 2), (0.69, 2), (0.89, 3), (0.95, 4)]:
        assert set(draw(logits, top_p=top_p)[0].tolist()) == set(range(kept))


def test_top_k_applies_before_top_p() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().expand(2000, 4)
    # Of the two best alone, the first holds 4/7 and already reaches 0.5.
    assert set(draw(logits, top_p=0.5, top_k=2)[0].tolist()) == {0}


def test_temperature_0_takes_the_best_token_with_its_logprob_at_temperature_1() -> None:
    logits = torch.randn(100, 20)
    tokens, logprobs = draw(logits, temperature=0, top_p=0.1, top_k=1)
    assert (tokens == logits.argmax(-1).numpy()).all()
    assert_rounded(logprobs, logits.double().log_softmax(-1).max(-1).values, 4, scale=logits.abs().max())


def test_rows_are_drawn_each_with_its_own_settings() -> None:
    logits = torch.randn(4, 20)
    settings: tuple[Any, ...] = (
        np.array([0, 1, 0.5, 2], np.float32),
        np.array([1, 0.5, 1, 0.9], np.float32),
        np.array([0, 0, 4, 7]),
        uniforms(9, np.arange(4)),
    )
    together = sample(logits, *settings)
    for i in range(4):
        alone = sample(logits[i : i + 1], *(s[i : i + 1] for s in settings))
        assert alone[0][0] == together[0][i]
        assert_rounded(alone[1][0], together[1][i], 2, scale=2 * logits.abs().max())
    scored, _ = scoring.score(logits, None, torch.from_numpy(together[0]), *settings[:3])
    # one of the temperatures is 0.5
    assert_rounded(scored, together[1], 4, scale=2 * logits.abs().max())


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1, 1, 0), (0.6, 1, 0), (1.3, 0.7, 0), (1, 0.9, 5), (0, 0.5, 2)]
)
def test_the_trainer_scores_sampled_tokens_as_the_engine_did(
    temperature: float, top_p: float, top_k: int
) -> None:
    logits = torch.randn(500, 30) * 3
    tokens, logprobs = draw(logits, temperature, top_p, top_k)
    scored = score(logits, tokens, temperature, top_p, top_k)
    assert_rounded(scored, logprobs, 4, scale=logits.abs().max() / (temperature or 1))


def test_a_token_outside_the_nucleus_has_a_finite_logprob_and_a_gradient() -> None:
    logits = torch.tensor([[5.0, 4.0, 0.0, -1.0]], requires_grad=True)
    logprob = score(logits, np.array([2]), top_p=0.5, top_k=1)
    logprob.sum().backward()
    # of the three best: the support reaches down to it
    assert logprob.item() == pytest.approx(-math.log(math.exp(5) + math.exp(4) + 1))
    assert logits.grad is not None and logits.grad[0, 2] > 0


@settings(deadline=None, max_examples=examples(30))
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(1, 1100), spread=st.sampled_from([0.1, 3.0, 30.0]))
def test_a_token_is_where_the_sum_of_probabilities_passes_the_uniform(
    seed: int, size: int, spread: float
) -> None:
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(16, size, generator=random) * spread
    logits[:, torch.rand(size, generator=random) < 0.3] = -torch.inf
    logits[:, int(torch.randint(size, (), generator=random))] = 0.0
    draws = np.concatenate([uniforms(seed, np.arange(14)), [0.0, np.nextafter(1, 0)]])
    ones = np.ones(16, np.float32)
    tokens, logprobs = sample(logits, ones, ones, np.zeros(16, np.int64), draws)
    exact = torch.log_softmax(logits.double(), -1)
    # by the size of the logits, and of the logarithm of their number
    scale = logits[logits.isfinite()].abs().max() + math.log(size) + 1
    assert_rounded(logprobs, exact.gather(1, torch.from_numpy(tokens)[:, None])[:, 0], 2, scale=scale)
    assert np.isfinite(logprobs).all()
    reached = exact.exp().cumsum(-1).numpy()
    # of a weight by the size of its logarithm, which in the mean is at most that of their number
    close = 4 * np.finfo(np.float32).eps * (math.log(size) + 1)
    for row, token in enumerate(tokens):
        below = reached[row, token - 1] if token else 0.0
        assert below - close <= draws[row] <= reached[row, token] + close


@pytest.mark.parametrize("num_tokens", [5, 256, 300])
@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.5, 0), (1.0, 3), (0.0, 2**31 - 1)])
def test_a_row_without_a_distribution_changes_no_other_row(num_tokens: int, top_p: float, top_k: int) -> None:
    logits = torch.randn(7, num_tokens, generator=torch.Generator().manual_seed(0)) * 10
    temperature = np.array([1, 1, 1, 1, 1e-38, 1e-44, 0], np.float32)
    how = temperature, np.full(7, top_p, np.float32), np.full(7, top_k), np.full(7, 1 - 2**-53)
    sound = [0, 6]
    expected = sample(logits[sound], *(values[sound] for values in how))
    logits[1] = torch.nan
    logits[2, 3] = torch.inf
    logits[3] = -torch.inf
    tokens, logprobs = sample(logits, *how)
    assert [tokens[sound].tolist(), logprobs[sound].tolist()] == [values.tolist() for values in expected]
    assert np.isnan(np.delete(logprobs, sound)).all()
    assert ((tokens >= 0) & (tokens < num_tokens)).all()
