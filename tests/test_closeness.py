"""What float32 costs a network, measured against float64, sizes the tolerances of closeness.py."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.bench import closeness
from tests.bench.training import policies

MARGIN = 4
"""How much more is allowed: what is compared may compute in another order, on another machine."""


def normalised(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
    """What a norm of transformers computes, which always computes in float32."""
    size = hidden.square().mean(-1, keepdim=True) + norm.variance_epsilon
    return norm.weight * hidden * size.rsqrt()


def logprobs_and_gradients(folder: Path, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    # fast kernels for experts are not for float64
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager").eval()
    if dtype == torch.float64:
        for module in model.modules():
            if hasattr(module, "variance_epsilon"):
                module.forward = partial(normalised, module)
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(policies.VOCABULARY, (8, 24), generator=random)
    advantages = torch.randn(8, 1, generator=random)
    found = model(ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    (found * advantages).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return found, {name: gradient for name, gradient in gradients.items() if gradient is not None}


@pytest.mark.parametrize(
    "make", [policies.qwen, policies.gpt2, policies.phi, policies.mixture], ids=lambda make: make.__name__
)
def test_networks_cost_a_part_of_what_is_allowed(make: Any, tmp_path: Path) -> None:
    make().save_pretrained(tmp_path)
    (found, gradients), (exact, wanted) = (
        logprobs_and_gradients(tmp_path, dtype) for dtype in (torch.float32, torch.float64)
    )
    closeness.assert_rounded(found, exact, closeness.FORWARD / MARGIN)
    closeness.assert_gradients(gradients, wanted, closeness.BACKWARD / MARGIN)


def test_a_tolerance_grows_with_the_numbers_and_shrinks_with_them() -> None:
    for size in (1e-6, 1.0, 1e6):
        exact = np.array([size, size / 1000])
        closeness.assert_rounded(exact * (1 + 1e-6), exact, 10)
        with pytest.raises(AssertionError, match=r"^a number is .* at index 1, and .* is 10 roundings of "):
            closeness.assert_rounded(exact + [0, size * 2e-6], exact, 10)


def test_a_gradient_is_measured_by_its_own_size_unless_it_is_a_difference_of_larger_ones() -> None:
    exact = {"large": np.array([1.0]), "small": np.array([0.01]), "none": np.array([0.0])}
    closeness.assert_gradients({**exact, "none": np.array([1e-8])}, exact, 100)
    for name, wrong in (("small", 0.01001), ("none", 1e-6)):
        with pytest.raises(AssertionError, match=f"^{name} is "):
            closeness.assert_gradients({**exact, name: np.array([wrong])}, exact, 100)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_not_finite_is_no_rounding(wrong: float) -> None:
    with pytest.raises(AssertionError):
        closeness.assert_rounded([1.0, wrong], [1.0, 1.0], 1e9)
    closeness.assert_rounded([1.0, wrong], [1.0, wrong], 1)
