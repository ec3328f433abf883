"""Settings of small simulated fleets."""

from __future__ import annotations

from typing import Any

from benchmarks.simulation.overheads import Overheads
from benchmarks.simulation.variants import Lognormal
from sf_core.config import RunConfig
from sf_core.config.validation import validate_config

LENGTHS = Lognormal(prompt=100, median=150.0, sigma=1.0, longest=1000)
FAST_WEIGHTS = {"write_bandwidth": 1e11, "verify_bandwidth": 1e11, "load_bandwidth": 1e11}
NOTHING = Overheads(0.0, 0.0, 0.0, 0.0, 0.0)


def config(iterations: int = 6, **sections: dict[str, Any]) -> RunConfig:
    data: dict[str, Any] = {
        "rollout": {"group_size": 4, "groups_per_batch": 16, "max_tokens": 1000},
        "train": {"iterations": iterations},
        "engine": {"kind": "emulated", "max_running": 8, "context_length": 2048},
        "emulation": FAST_WEIGHTS,
    }
    for name, values in sections.items():
        data[name] = data.get(name, {}) | values
    return validate_config(data)
