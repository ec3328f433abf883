from pathlib import Path

import pytest
import torch

from tests.sf_core.training.model_contract import ModelTests
from tests.sf_core.training.torch.policies import POLICIES, granite, phi


class TestContract(ModelTests):
    backend = "sf_core.training.torch.backend"
    layouts = ((1, {}), (2, {}), (2, {"recompute": True}))

    @pytest.fixture(
        params=[
            # what differs in these is the head, which test_network.py covers
            pytest.param(make, marks=[pytest.mark.nightly] * (make in (granite, phi)), id=make.__name__)
            for make in POLICIES
        ]
    )
    def policy(self, request: pytest.FixtureRequest, tmp_path: Path) -> str:
        torch.manual_seed(0)
        request.param().save_pretrained(tmp_path / "policy")
        return str(tmp_path / "policy")
