"""The torch backend: its two functions."""

from sf_core.training.resident import trainer_at
from sf_core.training.torch.rendezvous import meet

__all__ = ["meet", "trainer_at"]
