"""The pipelines of a configuration side by side, simulated: what `python -m benchmarks.simulation` shows."""

from __future__ import annotations

from collections import Counter

from rich.table import Table

from benchmarks.simulation.bubbles import Work, expected_bubble
from benchmarks.simulation.device import Failures
from benchmarks.simulation.fleet import Turn
from benchmarks.simulation.simulator import Turns
from benchmarks.simulation.variants import (
    VARIANTS,
    Devices,
    Variant,
    configure,
    draw,
    figures_of,
    simulate_variant,
)
from sf_core.config import RunConfig
from sf_core.reports.charts import draw_timeline
from sf_core.reports.view import RunView
from sf_core.scheduling.plan import make_plan
from storage.files import write_atomic
from storage.tables.trajectories import read_trajectories


class MeasuredLengths:
    """Session lengths drawn from the stored sessions of a run; each session counts as one turn of its prompt
    tokens and its sampled tokens.

    Raises ValueError if there is no such run, or it has no iteration yet."""

    def __init__(self, uri: str) -> None:
        sampled = Counter[str]()
        others = Counter[str]()
        for part in RunView.open(uri).parts("trains iteration"):
            for row in read_trajectories(part, ["session_id", "loss_mask", "shared_prefix"]).to_pylist():
                session = row["session_id"]
                num_sampled = sum(row["loss_mask"])
                sampled[session] += num_sampled
                # the parent branch has counted what it shares
                others[session] += len(row["loss_mask"]) - row["shared_prefix"] - num_sampled
        if not sampled:
            raise ValueError(f"{uri}: no iteration was rolled out, so no lengths were measured")
        self._lengths = [(others[session], max(1, sampled[session])) for session in sorted(sampled)]

    def __call__(self, group: int, member: int) -> list[Turn]:
        return [Turn(*self._lengths[int(draw(group, member) * len(self._lengths))])]


def comparison(
    config: RunConfig,
    devices: Devices,
    turns: Turns,
    *,
    failures: Failures | None = None,
    work: Work | None = None,
    picture: str | None = None,
) -> Table:
    """Table of all simulated pipelines; the timeline of the multiplexed one is drawn to `picture`. With the
    work of an iteration it has the least share that is idle.

    Raises ValueError, one sentence, if the devices or iterations are too few."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("pipeline")
    bound = ("idle at least",) if work is not None else ()
    for name in ("tokens/s", "s/iteration", "idle", "max lag", "switches", *bound):
        table.add_column(name, justify="right")
    table.add_column("idle by cause")
    for name, variant in VARIANTS.items():
        simulated = simulate_variant(config, variant, devices, turns, failures=failures)
        found = figures_of(simulated)
        table.add_row(
            name.replace("_", ", "),
            f"{found.tokens_per_second:,.0f}",
            f"{found.seconds_per_iteration:.2f}",
            f"{found.idle_fraction:.1%}",
            str(found.max_lag),
            str(found.switches),
            *([f"{_least_idle(config, variant, devices, work):.1%}"] if work is not None else []),
            ", ".join(f"{cause} {share:.1%}" for cause, share in found.idle_by_cause.items() if share),
        )
        if picture is not None and name == "multiplexed":
            last = simulated.iterations[-6:]
            first = len(simulated.iterations) - len(last)
            windows = {first + i: (iteration.start, iteration.end) for i, iteration in enumerate(last)}
            spans = simulated.spans
            drawn = draw_timeline(title="multiplexed, simulated", spans=spans, iterations=windows)
            write_atomic(picture, drawn)
    return table


def _least_idle(config: RunConfig, variant: Variant, devices: Devices, work: Work) -> float:
    plan = make_plan(devices.workers_of(variant), configure(config, variant, devices))
    return expected_bubble(plan, variant.overlap, work)
