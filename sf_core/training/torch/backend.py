"""The torch backend: how its ranks meet and what they hold."""

from sf_core.config import RunConfig
from sf_core.training.resident import rest, trainer_at
from sf_core.training.torch.ranks import Ranks
from sf_core.training.torch.rendezvous import meet
from sf_core.training.torch.torch_model import TorchModel

__all__ = ["make_model", "meet", "rest", "trainer_at"]


def make_model(
    config: RunConfig, model_dir: str, ranks: Ranks, device: str, *, values: bool = False
) -> TorchModel:
    """The `make_model` of a ModelBackend."""
    dtype, recompute = config.policy.dtype_name, config.train.recompute
    return TorchModel(model_dir, ranks, device=device, dtype=dtype, recompute=recompute, values=values)
