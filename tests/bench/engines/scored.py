"""Log-probs under the distribution that an engine draws from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from sf_core.models.scoring import score
from sf_core.types import Sampling


def score_drawn(logits: torch.Tensor, ids: Sequence[int], sampling: Sampling) -> npt.NDArray[np.float32]:
    """Log-probs of the ids, each drawn by its row of the logits [len(ids), vocabulary]."""
    each = np.full(len(ids), 1)
    scores, _ = score(
        logits,
        None,
        torch.tensor(ids),
        (each * sampling.temperature).astype(np.float32),
        (each * sampling.top_p).astype(np.float32),
        each * sampling.top_k,
    )
    return scores.numpy()
