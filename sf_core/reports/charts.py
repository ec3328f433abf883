"""Charts, as PNG: a run's reward curve with device activity below it, the timeline of its last iterations,
and the settings of a sweep beside each other."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sf_core.scheduling.figures import by_worker
from sf_core.scheduling.timeline import Span, idle_fraction

COLOURS = {"rollout": "#4c9f70", "train": "#d1495b"}
MOVING = "#e9b44c"
INK = "#2e4057"
SEED = "#8a5a00"
GROUND = "#f3f1ec"
"""Colour of idle time, in which no tag holds the device."""


def draw_curve(rewards: Mapping[int, float], evaluations: Mapping[int, float]) -> bytes:
    """PNG of the reward curve. rewards: mean by iteration; evaluations: held-out reward by policy version."""
    figure, axes = _plots(figsize=(9, 3))
    _draw_rewards(axes, rewards, evaluations)
    return _png(figure)


def draw_run(
    *,
    rewards: Sequence[float],
    evaluations: Mapping[int, float],
    spans: Sequence[Span],
    boundaries: Sequence[float],
) -> bytes:
    """PNG of a run. rewards: mean per iteration; evaluations: held-out reward by policy version; boundaries:
    Unix seconds at which iterations ended."""
    workers = sorted({span.worker for span in spans})
    figure, (curve, lanes) = _plots(2, 1, figsize=(10, 5.2), height_ratios=[2.4, 0.35 + 0.45 * len(workers)])
    _draw_rewards(curve, dict(enumerate(rewards)), evaluations)
    origin = min((span.start for span in spans), default=0.0)
    _draw_devices(lanes, workers, spans, origin)
    for end in boundaries:
        lanes.axvline(end - origin, color=INK, alpha=0.15, linewidth=0.6)
    lanes.set(yticklabels=workers)
    _legend(figure)
    return _png(figure)


@dataclass(frozen=True, slots=True)
class SweepRow:
    """A setting of a sweep in its chart."""

    label: str
    points: Mapping[str, Sequence[float]]
    """Values of the runs, by the figure."""
    means: Mapping[str, float]
    """Means over the runs, by the figure."""
    intervals: Mapping[str, tuple[float, float]]
    """95 % intervals of the means, by the figure, as far as there are any."""


def draw_sweep(name: str, rows: Sequence[SweepRow], before: float | None) -> bytes:
    """PNG of a sweep: a row per setting, with its seeds, their mean and the 95 % interval, beside each other
    for reward, tokens and seconds. before: held-out reward before training. Shapes tell what colours would.
    """
    panels = {"reward": "held-out reward", "tokens": "tokens sampled", "seconds": "seconds"}
    lines = sum(1 + row.label.count("\n") for row in rows)
    figure, axes = _plots(1, 3, figsize=(11, 1.9 + 0.34 * lines + 0.2 * len(rows)), sharey=True)
    for panel, (key, title) in zip(axes, panels.items(), strict=True):
        for line, row in enumerate(rows):
            _draw_measure(panel, line, row, key)
        if key == "reward" and before is not None:
            panel.axvline(before, color=INK, linewidth=1, linestyle=(0, (2, 2)), zorder=1)
        if key == "tokens":
            panel.xaxis.set_major_formatter(_shortened)
        panel.set(xlabel=title, ylim=(len(rows) - 0.4, -0.6))
        panel.grid(axis="x", alpha=0.25)
        panel.spines[["top", "right", "left"]].set_visible(False)
        panel.tick_params(axis="y", length=0)
    axes[0].set(yticks=range(len(rows)), yticklabels=[row.label for row in rows])
    figure.suptitle(f"Sweep {name}: mean and 95 % interval (Student's t over seeds)", color=INK, fontsize=11)
    _sweep_legend(figure, before)
    return _png(figure)


def _draw_measure(panel: Any, line: int, row: SweepRow, key: str) -> None:
    """What the runs of one setting reached of one measure."""
    seeds = row.points.get(key, ())
    # above the interval, whose mean would hide them
    panel.plot(seeds, [line - 0.16] * len(seeds), "o", mfc="none", mec=SEED, markersize=6, zorder=2)
    if key in row.intervals:
        interval = row.intervals[key]
        panel.plot(interval, [line, line], "-", color=INK, linewidth=2, zorder=3)
        panel.plot(interval, [line, line], "|", color=INK, markersize=11, mew=2, zorder=3)
    if key in row.means:
        panel.plot([row.means[key]], [line], "D", color=INK, markersize=6, zorder=4)


def _shortened(value: float, _: object) -> str:
    """A number of tokens at a tick."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _sweep_legend(figure: Any, before: float | None) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], marker="o", mfc="none", mec=SEED, linestyle="", label="one seed"),
        Line2D([], [], marker="D", color=INK, linestyle="", label="mean"),
        Line2D([], [], marker="|", color=INK, linewidth=2, mew=2, markersize=11, label="95 % interval"),
    ]
    if before is not None:
        handles.append(Line2D([], [], color=INK, linewidth=1, ls=(0, (2, 2)), label="before training"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)


def draw_timeline(
    *, title: str, spans: Sequence[Span], iterations: Mapping[int, tuple[float, float]]
) -> bytes:
    """PNG of these iterations, given by number with start and end in Unix seconds.

    One row per device, a colour per active tag; where the background shows, no tag held the device."""
    start = min((window[0] for window in iterations.values()), default=0.0)
    end = max((window[1] for window in iterations.values()), default=1.0)
    inside = [span for span in spans if span.end > start and span.start < end]
    devices = by_worker(inside)

    def order(worker: str) -> tuple[bool, str]:
        return any(span.tag == "train" for span in devices[worker]), worker

    # trainers below, so that rollout during training stands above them
    workers = sorted(devices, key=order)
    figure, axes = _plots(figsize=(12, 1.6 + 0.55 * max(1, len(workers))))
    _draw_devices(axes, workers, inside, start)
    for number, window in iterations.items():
        axes.axvline(window[1] - start, color=INK, alpha=0.7, linewidth=0.9, linestyle=(0, (3, 2)))
        axes.annotate(
            f"iteration {number}" if number == min(iterations) else str(number),
            ((window[0] + window[1]) / 2 - start, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            fontsize=9,
            color=INK,
        )
    idle = [idle_fraction(devices[worker], (start, end)) for worker in workers]
    labels = [f"{worker}   idle {share:.0%}" for worker, share in zip(workers, idle, strict=True)]
    axes.set(xlim=(0, end - start), yticklabels=labels)
    axes.set_title(title, fontsize=11, pad=20, color=INK, loc="left")
    _legend(figure)
    return _png(figure)


def _draw_rewards(axes: Any, rewards: Mapping[int, float], evaluations: Mapping[int, float]) -> None:
    # with markers, or a single iteration would be invisible
    line = {"color": "#8a8f98", "linewidth": 1.2, "marker": ".", "markersize": 3}
    axes.plot(list(rewards), list(rewards.values()), label="training batches", **line)
    axes.plot(list(evaluations), list(evaluations.values()), "o-", color=INK, label="held-out tasks")
    axes.set(xlabel="iteration", ylabel="mean reward", ylim=(0, 1.02))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.25)
    axes.legend(loc="best", frameon=False)


def _draw_devices(axes: Any, workers: Sequence[str], spans: Sequence[Span], origin: float) -> None:
    """Draw one row per device: pale where a tag holds it, solid where it computes."""
    # later kinds are drawn over the spans that hold the device
    for kind in ("held", "moving", "busy"):
        bars: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        for span in spans:
            if span.kind == kind:
                bars[span.worker, span.tag].append((span.start - origin, span.end - span.start))
        for (worker, tag), ranges in bars.items():
            axes.broken_barh(
                ranges,
                (workers.index(worker) - 0.38, 0.76),
                color=MOVING if kind == "moving" else COLOURS[tag],
                alpha=0.25 if kind == "held" else 1.0,
                linewidth=0,
            )
    axes.set(xlabel="seconds", yticks=range(len(workers)), ylim=(len(workers) - 0.5, -0.5))
    axes.set_facecolor(GROUND)
    axes.spines[:].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _legend(figure: Any) -> None:
    from matplotlib.patches import Patch

    handles = [
        *(Patch(color=colour, label=tag) for tag, colour in COLOURS.items()),
        Patch(color=MOVING, label="loads, saves, hands over"),
        Patch(color=COLOURS["rollout"], alpha=0.25, label="held, computing nothing"),
        Patch(facecolor=GROUND, edgecolor="#b8b4a8", linewidth=0.6, label="held by nobody"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)


def _plots(*shape: int, figsize: tuple[float, float], **settings: Any) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=figsize, layout="constrained")
    return figure, figure.subplots(*shape, **settings)


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=130)
    return buffer.getvalue()
