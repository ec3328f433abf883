"""The Megatron backend: ranks meet as those of the torch backend do, and hold a policy that Megatron cuts."""

from sf_core.config import RunConfig
from sf_core.training.megatron.megatron_model import MegatronModel
from sf_core.training.resident import rest, trainer_at
from sf_core.training.torch.ranks import Ranks
from sf_core.training.torch.rendezvous import meet

__all__ = ["make_model", "meet", "rest", "trainer_at"]


def make_model(
    config: RunConfig, model_dir: str, ranks: Ranks, device: str, *, values: bool = False
) -> MegatronModel:
    """The `make_model` of a ModelBackend."""
    dtype = config.policy.dtype_name
    return MegatronModel(model_dir, ranks, config.train, device=device, dtype=dtype, values=values)
