"""Where multiplexing gains and where not: the pipelines in the simulator, one condition varied at a time.

Draws docs/pipelines.png and prints one JSON line with the points: tokens/s of every pipeline by condition.

    python -m benchmarks.pipeline_maps
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any

import matplotlib.pyplot as plt
import typer

from benchmarks.heavy_tailed import LENGTHS
from benchmarks.pipelines import base_config
from sf_core.config import RunConfig
from sf_core.scheduling.simulations import VARIANTS, Devices, Lognormal, figures_of, simulate_variant

COLOURS = {
    "colocated": "#7a5195",
    "colocated_drained": "#bc8fc9",
    "disaggregated": "#8a8f98",
    "async": "#e9b44c",
    "multiplexed": "#d1495b",
}
ITERATIONS = 8
HALF_DUAL = Devices(4, 4)


@dataclass(frozen=True)
class Point:
    config: RunConfig
    devices: Devices = HALF_DUAL
    lengths: Lognormal = LENGTHS

    def tokens_per_second(self, name: str) -> float:
        run = simulate_variant(self.config, VARIANTS[name], self.devices, self.lengths)
        return figures_of(run).tokens_per_second


@dataclass(frozen=True)
class Panel:
    key: str
    label: str
    values: Iterable[float]
    point: Callable[[float], Point]
    is_log: bool = False


def emulated(**emulation: float) -> RunConfig:
    config = base_config(8, ITERATIONS)
    return config.model_copy(update={"emulation": config.emulation.model_copy(update=emulation)})


def share_of_training(share: float) -> Point:
    """A quarter of the device time is training's on the benchmark's devices. Decoding is bound by memory:
    FLOP/s change what training takes and nearly nothing else."""
    faster = 0.25 / 0.75 * (1 - share) / share
    return Point(emulated(peak_flops=989e12 * faster))


def tail(sigma: float) -> Point:
    """The mean of what is not cut stays about the same."""
    mean = LENGTHS.median * math.exp(LENGTHS.sigma**2 / 2)
    return Point(emulated(), lengths=replace(LENGTHS, sigma=sigma, median=mean / math.exp(sigma**2 / 2)))


def switch_cost(seconds: float) -> Point:
    return Point(emulated(to_rollout_s=seconds / 2, to_train_s=seconds / 2))


def size(devices: float) -> Point:
    num = int(devices)
    return Point(base_config(num, 5), Devices(num // 2, num - num // 2))


PANELS = (
    Panel("train_share", "training's share of the work", (0.05, 0.1, 0.2, 0.3, 0.4, 0.5), share_of_training),
    Panel("sigma", "sigma of the lognormal lengths", (0.0, 0.5, 1.0, 1.5), tail),
    Panel("switch_s", "both switches together, seconds", (0.0, 1.0, 4.0, 8.0, 16.0), switch_cost),
    Panel("devices", "devices, half of them dual", (4, 8, 32, 128, 512), size, is_log=True),
)


def main(picture: Annotated[str, typer.Option(help="PNG")] = "docs/pipelines.png") -> None:
    figure, axes = plt.subplots(1, 4, figsize=(15, 4.2), sharey=True, constrained_layout=True)
    line: dict[str, Any] = {}
    for panel, plot in zip(PANELS, axes, strict=True):
        line[panel.key] = points = measure(panel)
        draw(panel, points, plot)
        print(panel.key, json.dumps(points), file=sys.stderr, flush=True)
    axes[0].set_ylabel("tokens/s, multiplexed = 1")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncol=5, frameon=False)
    figure.savefig(picture, dpi=110)
    print(json.dumps(line))


def measure(panel: Panel) -> dict[str, list[float]]:
    points: dict[str, list[float]] = {"values": list(panel.values)}
    for name in VARIANTS:
        points[name] = [panel.point(value).tokens_per_second(name) for value in panel.values]
    return points


def draw(panel: Panel, points: dict[str, list[float]], plot: Any) -> None:
    for name, colour in COLOURS.items():
        shares = [own / best for own, best in zip(points[name], points["multiplexed"], strict=True)]
        plot.plot(points["values"], shares, "o-", color=colour, label=name.replace("_", ", "), markersize=4)
    plot.set(xlabel=panel.label, ylim=(0, 1.25))
    if panel.is_log:
        plot.set_xscale("log", base=2)
        plot.set_xticks(points["values"], [f"{value:g}" for value in points["values"]])
    plot.grid(alpha=0.25)
    plot.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    typer.run(main)
