"""Where multiplexing gains and where not: the pipelines in the simulator, one condition varied at a time.

Draws docs/pictures/pipelines.png and prints one JSON line with the points: tokens/s of each pipeline by
condition.

    python -m benchmarks.pipeline_maps
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import matplotlib.pyplot as plt
import typer

from benchmarks.heavy_tailed import LENGTHS
from benchmarks.pipelines import base_config
from benchmarks.simulation.variants import (
    TOOLS,
    VARIANTS,
    Devices,
    Lognormal,
    figures_of,
    simulate_variant,
)
from sf_core.config import EmulationConfig, RunConfig

DELTAS = {"stored_bytes_per_parameter": 0.03, "verify_bandwidth": 1e12}
"""Nothing but what changed is on the way of the weights: neither written whole nor checked whole."""

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


SHARED_KV = 180_000
WHOLE_KV = 377_000
"""KV cache of an H100 in tokens, beside weights and a quarter of a trainer's state, or weights alone."""

TRAIN_SHARE = 0.44
"""Share of training in the device time of a batch, at a cap of 64 (docs/concepts/pipelines.md)."""

SECONDS_OF_SAMPLING = 11.2
WAITS = 4.8
MEAN_OF_MEDIAN = 2.05
"""Seconds of sampling per session at a cap of 64; mean number of tool calls; mean over median of a call."""


def emulated(weights: dict[str, Any], **emulation: float) -> RunConfig:
    config = base_config(8, ITERATIONS)
    return config.model_copy(
        update={"emulation": config.emulation.model_copy(update=weights | emulation)},
    )


def cap(weights: dict[str, Any], value: float) -> Point:
    """Above 64 there is no room for a trainer's state, which is assumed to be moved away at no cost."""
    config = emulated(weights, kv_tokens=SHARED_KV if value <= 64 else WHOLE_KV)
    engine = config.engine.model_copy(update={"max_running": int(value)})
    return Point(config.model_copy(update={"engine": engine}))


def share_of_tools(weights: dict[str, Any], share: float) -> Point:
    mean_s = SECONDS_OF_SAMPLING * share / (1 - share) / WAITS
    tools = replace(TOOLS, median_s=mean_s / MEAN_OF_MEDIAN)
    return Point(emulated(weights), lengths=replace(LENGTHS, tools=tools))


def batch(weights: dict[str, Any], sessions: float) -> Point:
    config = emulated(weights)
    groups = round(sessions / config.rollout.group_size)
    rollout = config.rollout.model_copy(update={"groups_per_batch": groups})
    return Point(config.model_copy(update={"rollout": rollout}))


def lag(weights: dict[str, Any], bound: float) -> Point:
    config = emulated(weights)
    rollout = config.rollout.model_copy(update={"max_lag": int(bound)})
    return Point(config.model_copy(update={"rollout": rollout}))


def weight_path(factor: float) -> Point:
    usual = EmulationConfig()
    bandwidths = {
        name: factor * getattr(usual, name)
        for name in ("write_bandwidth", "verify_bandwidth", "load_bandwidth")
    }
    return Point(emulated(bandwidths))


def share_of_training(weights: dict[str, Any], share: float) -> Point:
    """Vary the FLOP/s: they change training and prefill, which is little; decoding is bound by memory."""
    faster = TRAIN_SHARE / (1 - TRAIN_SHARE) * (1 - share) / share
    return Point(emulated(weights, peak_flops=989e12 * faster))


def tail(weights: dict[str, Any], sigma: float) -> Point:
    """Vary the tail; the mean length before the cut stays the same."""
    mean = LENGTHS.median * math.exp(LENGTHS.sigma**2 / 2)
    lengths = replace(LENGTHS, sigma=sigma, median=mean / math.exp(sigma**2 / 2))
    return Point(emulated(weights), lengths=lengths)


CAPS = (16, 32, 64, 128, 192)
TOOL_SHARES = (0.0, 0.25, 0.5, 0.75)
BATCHES = (256, 512, 1024, 2048)

PANELS = (
    Panel("cap", "in-flight cap", CAPS, partial(cap, {}), is_log=True),
    Panel("tools", "tools' share of a session", TOOL_SHARES, partial(share_of_tools, {})),
    Panel("sessions", "sessions per batch", BATCHES, partial(batch, {}), is_log=True),
    Panel(
        "weight_path", "times the speed of the weight path", (0.25, 1, 4, 16, 64), weight_path, is_log=True
    ),
    Panel("lag", "lag bound", (1, 2, 4), partial(lag, {})),
    Panel("deltas_cap", "in-flight cap; deltas alone", CAPS, partial(cap, DELTAS), is_log=True),
    Panel("deltas_tools", "tools' share; deltas alone", TOOL_SHARES, partial(share_of_tools, DELTAS)),
    Panel(
        "deltas_sessions",
        "sessions per batch; deltas alone",
        BATCHES,
        partial(batch, DELTAS),
        is_log=True,
    ),
    Panel(
        "deltas_train_share",
        "training's share of the work; deltas alone",
        (0.05, 0.1, 0.2, 0.3, 0.4, 0.5),
        partial(share_of_training, DELTAS),
    ),
    Panel("deltas_sigma", "sigma of the lengths; deltas alone", (0.0, 0.5, 1.0, 1.5), partial(tail, DELTAS)),
)


def main(picture: Annotated[str, typer.Option(help="PNG")] = "docs/pictures/pipelines.png") -> None:
    figure, axes = plt.subplots(2, 5, figsize=(18, 7.5), sharey=True, constrained_layout=True)
    line: dict[str, Any] = {"benchmark": "pipeline_maps"}
    for panel, plot in zip(PANELS, axes.flat, strict=True):
        line[panel.key] = points = measure(panel)
        draw(panel, points, plot)
        print(panel.key, json.dumps(points), file=sys.stderr, flush=True)
    for row in axes:
        row[0].set_ylabel("tokens/s, multiplexed = 1")
    handles, labels = axes.flat[0].get_legend_handles_labels()
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
    plot.set(xlabel=panel.label, ylim=(0, 1.5))
    if panel.is_log:
        plot.set_xscale("log", base=2)
        plot.set_xticks(points["values"], [f"{value:g}" for value in points["values"]])
    plot.grid(alpha=0.25)
    plot.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    typer.run(main)
