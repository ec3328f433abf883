"""Gain from moving requests from long queues to short ones: every pipeline, simulated with and without.

    python -m benchmarks.rebalancing

Eight emulated H100 (default figures), four of which can train; 512 sessions a batch with lognormal lengths;
an engine runs as many at once as `cap` says. Prints one JSON line: by cap and pipeline the seconds that the
same iterations take without moves and with them, and the number of moves.
"""

from __future__ import annotations

import json
import math
from typing import Any

from benchmarks.simulation.variants import VARIANTS, Devices, Lognormal, simulate_variant
from sf_core.config import RunConfig
from sf_core.config.validation import validate_config
from sf_core.dataplane.routing import rebalancing

DEVICES = Devices(rollout=4, dual=4)
LENGTHS = Lognormal(prompt=512, median=1500.0, sigma=1.5, longest=32768)
ITERATIONS = 12
CAPS = (64, 256)
FAST_WEIGHTS = {
    "stored_bytes_per_parameter": 2.0,
    "write_bandwidth": 50e9,
    "verify_bandwidth": 50e9,
    "load_bandwidth": 50e9,
}
"""Weights in bfloat16 at the speed of a device's bus."""


def configure(cap: int) -> RunConfig:
    return validate_config(
        {
            "rollout": {"group_size": 8, "groups_per_batch": 64, "max_tokens": LENGTHS.longest},
            "train": {"iterations": ITERATIONS},
            "engine": {
                "kind": "emulated",
                "max_running": cap,
                "context_length": LENGTHS.prompt + LENGTHS.longest + 1,
            },
            "emulation": FAST_WEIGHTS,
        }
    )


def compare(cap: int, pipeline: str) -> dict[str, Any]:
    config = configure(cap)
    variant = VARIANTS[pipeline]
    excess = rebalancing.EXCESS
    rebalancing.EXCESS = math.inf
    without = simulate_variant(config, variant, DEVICES, LENGTHS)
    rebalancing.EXCESS = excess
    moved = simulate_variant(config, variant, DEVICES, LENGTHS)
    before = without.iterations[-1].end
    after = moved.iterations[-1].end
    return {
        "seconds_without": round(before),
        "seconds": round(after),
        "faster": round(before / after, 3),
        "moves": moved.moves,
    }


def main() -> None:
    result = {f"cap {cap}": {name: compare(cap, name) for name in VARIANTS} for cap in CAPS}
    print(json.dumps({"benchmark": "rebalancing", "iterations": ITERATIONS, **result}))


if __name__ == "__main__":
    main()
