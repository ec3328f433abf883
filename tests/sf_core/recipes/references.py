"""Our formulas on inputs of which other libraries have given theirs: tests/data/references.npz.

benchmarks/references.py makes that file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sf_core.recipes.advantages import Advantage, Gae, Grpo, LeaveOneOut, Whitened
from sf_core.recipes.losses import Kl, LossConfig, Tokens, mean_over
from tests.sf_core.recipes.batches import samples

FILE = Path(__file__).parents[2] / "data" / "references.npz"

ROWS = 8
WIDTH = 12
GROUP = 4

Arrays = Mapping[str, np.ndarray]


def inputs() -> dict[str, np.ndarray]:
    """Rows [R, T] of different lengths with holes in them, and what peers need to know of them."""
    random = np.random.default_rng(5)
    lengths = random.integers(2, WIDTH + 1, ROWS)
    mask = (np.arange(WIDTH) < lengths[:, None]) & (random.random((ROWS, WIDTH)) < 0.8)
    mask[:, 0] = True
    old = -3 * random.random((ROWS, WIDTH))
    return {
        "mask": mask,
        "old": old,
        "new": old + 0.5 * random.normal(size=(ROWS, WIDTH)),
        "reference": old + 0.3 * random.normal(size=(ROWS, WIDTH)),
        "advantages": random.normal(size=ROWS),
        "rewards": random.normal(size=ROWS),
        "values": random.normal(size=(ROWS, WIDTH)) * mask,
        "groups": np.repeat(np.arange(ROWS // GROUP), GROUP),
    }


_CLIP = {"low": 0.2, "high": 0.28, "cap": None}
_DUAL = _CLIP | {"cap": 3.0, "beyond": "dual"}
_SUM = {"mean_over": "constant", "session_tokens": WIDTH}

LOSSES: dict[str, dict[str, Any]] = {
    "verl clip token-mean": {"policy": _DUAL},
    "verl clip seq-mean-token-mean": {"policy": _DUAL, "mean_over": "session"},
    "verl clip seq-mean-token-sum-norm": {"policy": _DUAL, **_SUM},
    "verl gspo": {"policy": {"kind": "sequence_clip", "low": 3e-4, "high": 4e-4}, "mean_over": "session"},
    "verl cispo": {"policy": {"kind": "cispo", "high": 0.2}},
    "trl dapo": {"policy": _CLIP},
    "trl grpo": {"policy": _CLIP, "mean_over": "session"},
    "trl dr_grpo": {"policy": _CLIP, **_SUM},
    "trl dapo, kl": {"policy": _CLIP, "kl": {"coefficient": 0.1}},
    "trl grpo, kl": {"policy": _CLIP, "mean_over": "session", "kl": {"coefficient": 0.1}},
}
"""`train.loss` of what each is called there."""

ADVANTAGES: dict[str, Advantage] = {
    "verl grpo": Grpo(),
    "verl dr_grpo": Grpo(scale="none"),
    "verl rloo": LeaveOneOut(),
    "verl reinforce_plus_plus": Whitened(),
    "verl reinforce_plus_plus_baseline": Whitened(baseline=True),
    "verl gae": Gae(gamma=0.99, lam=0.95),
}

KLS = {"verl k1": "k1", "verl k2": "k2", "verl k3": "k3"}


def differences(theirs: Arrays) -> dict[str, dict[str, float]]:
    """Largest difference of value and gradient to what the file has, by formula."""
    found = {}
    for name, (value, gradient) in ours().items():
        wanted = theirs[f"{name}/value"]
        slope = theirs[f"{name}/gradient"]
        found[name] = {
            "value": float(np.abs(value - wanted).max()),
            "gradient": float(np.abs(gradient - slope).max()) if slope.size else 0.0,
        }
    return found


def ours() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Value and gradient by formula; those of advantages have none."""
    losses = {name: _loss(LossConfig.model_validate(settings)) for name, settings in LOSSES.items()}
    advantages = {name: (_advantages(formula), np.empty(0)) for name, formula in ADVANTAGES.items()}
    return losses | advantages | {name: _kl(estimator) for name, estimator in KLS.items()}


def _loss(loss: LossConfig) -> tuple[np.ndarray, np.ndarray]:
    given = inputs()
    mask = torch.from_numpy(given["mask"])
    new = torch.from_numpy(given["new"]).requires_grad_()
    old = torch.from_numpy(given["old"])[mask]
    reference = torch.from_numpy(given["reference"])[mask]
    row = torch.arange(ROWS).unsqueeze(1).expand_as(mask)[mask]
    advantages = torch.from_numpy(given["advantages"])[row]
    losses = loss.policy(Tokens(new[mask], old, advantages, row, ROWS))
    if loss.kl is not None:
        losses = losses + loss.kl.coefficient * loss.kl(new[mask], reference)
    units = None if loss.mean_over == "token" else [str(row) for row in range(ROWS)]
    factors, total = mean_over(given["mask"].sum(1).astype(np.float64), units, loss.session_tokens)
    value = (torch.from_numpy(factors)[row] * losses).sum() / total
    (gradient,) = torch.autograd.grad(value, new)
    return value.detach().numpy(), gradient.numpy()


def _advantages(formula: Advantage) -> np.ndarray:
    given = inputs()
    found = formula(
        samples(
            given["rewards"].tolist(),
            given["groups"].tolist(),
            masks=list(given["mask"]),
            scores={"values": [*given["values"]]},
        )
    )
    return np.stack([*found])


def _kl(estimator: str) -> tuple[np.ndarray, np.ndarray]:
    given = inputs()
    new = torch.from_numpy(given["new"]).requires_grad_()
    kl = Kl(coefficient=1.0, estimator=estimator)
    value = kl(new, torch.from_numpy(given["reference"]))
    (gradient,) = torch.autograd.grad(value.sum(), new)
    return value.detach().numpy(), gradient.numpy()
