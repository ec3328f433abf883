"""Draws a run: the reward curve above, what every device did below."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

from sf_core.scheduling.timeline import Span
from storage.files import write_atomic

COLOURS = {"rollout": "#4c9f70", "train": "#d1495b"}


def draw_run(
    uri: str,
    *,
    rewards: Sequence[float],
    evaluations: Mapping[int, float],
    spans: Sequence[Span],
    boundaries: Sequence[float],
) -> None:
    """Write a PNG. rewards: mean per iteration; evaluations: held-out reward by policy version;
    boundaries: Unix seconds at which iterations ended."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    workers = sorted({span.worker for span in spans})
    figure, (curve, lanes) = plt.subplots(
        2, 1, figsize=(10, 5.2), height_ratios=[2.4, 0.35 + 0.45 * len(workers)], constrained_layout=True
    )
    curve.plot(range(len(rewards)), rewards, color="#8a8f98", linewidth=1.2, label="training batches")
    curve.plot(list(evaluations), list(evaluations.values()), "o-", color="#2e4057", label="held-out tasks")
    curve.set(xlabel="iteration", ylabel="mean reward", ylim=(0, 1.02))
    curve.grid(alpha=0.25)
    curve.legend(loc="lower right", frameon=False)

    origin = min((span.start for span in spans), default=0.0)
    for row, worker in enumerate(workers):
        for span in (s for s in spans if s.worker == worker):
            bar = [(span.start - origin, span.end - span.start)]
            alpha = 0.25 if span.kind == "held" else 1.0
            lanes.broken_barh(bar, (row - 0.38, 0.76), color=COLOURS[span.tag], alpha=alpha, linewidth=0)
    for end in boundaries:
        lanes.axvline(end - origin, color="#2e4057", alpha=0.15, linewidth=0.6)
    lanes.set(
        xlabel="seconds", yticks=range(len(workers)), yticklabels=workers, ylim=(len(workers) - 0.5, -0.5)
    )
    lanes.set_facecolor("#f3f1ec")
    lanes.legend(
        handles=[Patch(color=colour, label=tag) for tag, colour in COLOURS.items()]
        + [Patch(color=COLOURS["rollout"], alpha=0.25, label="held, computing nothing")],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.45),
        ncols=3,
        frameon=False,
    )
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=130)
    plt.close(figure)
    write_atomic(uri, buffer.getvalue())
