from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sf_core.training.torch.torch_model import dither
from tests.bench.training import policies
from tests.bench.training.model_contract import FullModelTests


class TestContract(FullModelTests):
    backend = "sf_core.training.torch.backend:TorchBackend"
    layouts = ((1, {}), (2, {}), (2, {"recompute": True}))

    @pytest.fixture(
        params=[
            # what differs in these is the head, which test_network.py covers
            pytest.param(
                make,
                marks=[pytest.mark.nightly] * (make in (policies.granite, policies.phi)),
                id=make.__name__,
            )
            for make in policies.POLICIES
        ]
    )
    def policy(self, request: pytest.FixtureRequest, tmp_path: Path) -> str:
        torch.manual_seed(0)
        request.param().save_pretrained(tmp_path / "policy")
        return str(tmp_path / "policy")


@given(st.lists(st.floats(width=32), min_size=1, max_size=64), st.sampled_from(["bfloat16", "float32"]))
def test_spread_weights_are_other_numbers_that_round_to_the_same(values: list[float], kind: str) -> None:
    weights = torch.tensor(values).to(getattr(torch, kind)).float()
    before = weights.clone()
    rounded = weights.bfloat16()
    dither([weights])
    torch.testing.assert_close(weights.bfloat16(), rounded, rtol=0, atol=0, equal_nan=True)
    inexact = before != rounded.float()
    torch.testing.assert_close(weights[inexact], before[inexact], rtol=0, atol=0, equal_nan=True)


def test_spread_weights_move_by_as_much_as_steps_do_in_the_mean() -> None:
    weights = torch.full((100_000,), 0.0625)
    dither([weights])
    for _ in range(4):
        weights += 2e-5
    moved = weights.bfloat16().float().mean().item() - 0.0625
    assert moved == pytest.approx(8e-5, rel=0.05)
