"""Tests of what tells whether weights are finite."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sf_core.training.torch.trained_model import are_finite


@given(st.lists(st.lists(st.floats(width=32), max_size=4), max_size=4))
def test_tensors_are_finite_if_each_element_is(tensors: list[list[float]]) -> None:
    made = [torch.tensor(values) for values in tensors]
    assert are_finite(made) == all(bool(tensor.isfinite().all()) for tensor in made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_whose_norm_overflows_are_finite_still(dtype: torch.dtype) -> None:
    large = torch.full((8,), 3e38, dtype=dtype)
    assert large.norm().isinf()
    assert are_finite([large])
    assert not are_finite([large, torch.tensor([torch.nan], dtype=dtype)])
