"""The Megatron backend: ranks meet as those of the torch backend do, and hold a policy that Megatron cuts."""

from __future__ import annotations

from typing import Any

from sf_core.config import RunConfig
from sf_core.training.megatron.megatron_model import MegatronModel
from sf_core.training.torch.backend import TorchBackend
from sf_core.training.torch.ranks import Ranks
from sf_core.training.vision_tower import VisionTower


class MegatronBackend(TorchBackend):
    keeps_frozen = False  # Megatron makes an optimiser's memory for every model

    def make_model(
        self,
        config: RunConfig,
        model_dir: str,
        ranks: Ranks,
        device: str,
        *,
        values: bool = False,
        adapter: str | None = None,
        tower: VisionTower | None = None,
    ) -> MegatronModel:
        assert adapter is None, "configurations with train.lora and this backend are refused"
        assert tower is None, "multimodal policies and this backend are refused"
        dtype = config.policy.dtype_name
        return MegatronModel(model_dir, ranks, config.train, device=device, dtype=dtype, values=values)

    def make_frozen(
        self, config: RunConfig, model_dir: str, ranks: Ranks, device: str, **choices: Any
    ) -> MegatronModel:
        assert not any(choices.values()), "configurations with train.teacher and this backend are refused"
        return self.make_model(config, model_dir, ranks, device)
