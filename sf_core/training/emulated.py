"""A trainer that sleeps as long as a device would take and publishes a file that holds only its version."""

from __future__ import annotations

import time

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sf_core.scheduling.device_model import DeviceModel


class EmulatedTrainer:
    """One of `num_ranks` that share every batch evenly. Loads no library that computes."""

    def __init__(self, model: DeviceModel, version: int, num_ranks: int = 1) -> None:
        self.version = version
        self._model, self._num_ranks = model, num_ranks

    def step(self, batch: pa.Table) -> dict[str, float]:
        """Takes as long as a step on the tokens of the batch, prompts included."""
        num_tokens = pc.sum(pc.list_value_length(batch["token_ids"])).as_py()
        seconds = self._model.train_s(num_tokens, self._num_ranks)
        time.sleep(seconds)
        self.version += 1
        return {
            "tokens": float(pc.sum(pc.list_flatten(batch["loss_mask"])).as_py()),
            "rows": float(len(batch)),
            "reward_mean": float(pc.mean(batch["reward"]).as_py()),
            "seconds": seconds,
        }

    def weights(self) -> dict[str, np.ndarray]:
        return {"version": np.array([self.version], dtype=np.int32)}
