import math
from typing import get_args

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from sf_core.config import TrainConfig
from sf_core.config.run_config import LossName
from sf_core.training.losses import LOSSES, divergence, entropy, ppo_clip

SETTINGS = TrainConfig(clip_low=0.2, clip_high=0.28, importance_cap=3.0)

caps = st.floats(1, 6)
tokens = st.tuples(st.floats(-6, -0.01), st.floats(-6, -0.01), st.floats(-2, 2))


def naive_gradient(logprob: float, old: float, advantage: float, cap: float) -> float:
    """d loss / d logprob of one token, from the definition."""
    ratio = math.exp(logprob - old)
    if (advantage > 0 and ratio > 1.28) or (advantage < 0 and ratio < 0.8):
        return 0.0
    return -min(ratio, cap) * advantage


@given(st.lists(tokens, min_size=1, max_size=10), caps)
@example([(-1.0, -2.0, -1.0)], 1.0)  # the cap truncates what the clip would spare
def test_the_gradient_agrees_with_a_naive_reference(
    drawn: list[tuple[float, float, float]], cap: float
) -> None:
    columns = [torch.tensor(column, dtype=torch.float64) for column in zip(*drawn, strict=True)]
    logprobs, old, advantages = columns
    logprobs.requires_grad_()
    settings = SETTINGS.model_copy(update={"importance_cap": cap})
    ppo_clip(logprobs, old, advantages, settings).sum().backward()
    expected = [naive_gradient(*token, cap) for token in drawn]
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, torch.tensor(expected, dtype=torch.float64))


def test_on_policy_the_loss_is_minus_the_advantage() -> None:
    logprobs, advantages = torch.tensor([-1.0, -2.0]), torch.tensor([0.5, -1.5])
    loss = ppo_clip(logprobs, logprobs, advantages, SETTINGS)
    assert loss.tolist() == [-0.5, 1.5]


def test_a_token_far_from_its_behaviour_policy_keeps_loss_and_gradient_finite() -> None:
    logprobs = torch.tensor([-0.1, -500.0], requires_grad=True)
    old, advantages = torch.tensor([-500.0, -0.1]), torch.tensor([-1.0, 1.0])
    loss = ppo_clip(logprobs, old, advantages, SETTINGS)
    loss.sum().backward()
    assert logprobs.grad is not None
    assert loss.isfinite().all() and logprobs.grad.isfinite().all()


@given(st.lists(tokens, min_size=1, max_size=10))
def test_the_divergence_estimate_is_never_negative(drawn: list[tuple[float, float, float]]) -> None:
    columns = [torch.tensor(column, dtype=torch.float64) for column in zip(*drawn, strict=True)]
    assert (divergence(*columns, SETTINGS)["kl"] >= -1e-12).all()


def test_clipped_marks_the_tokens_without_gradient() -> None:
    logprobs = torch.tensor([-1.0, -1.0, -2.0, -2.0])
    old = torch.tensor([-2.0, -2.0, -1.0, -1.0])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    assert divergence(logprobs, old, advantages, SETTINGS)["clipped"].tolist() == [1, 0, 0, 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_entropy_of_equal_logits_is_the_log_of_their_number(temperature: float) -> None:
    assert entropy(torch.zeros(1, 8), torch.tensor([temperature])).item() == pytest.approx(math.log(8))


def test_the_losses_are_those_that_a_configuration_can_name() -> None:
    assert [*LOSSES] == [*get_args(LossName)]
