"""The pipelines of a configuration side by side, simulated: what `sf simulate` shows."""

from __future__ import annotations

from collections import Counter

from rich.table import Table

from sf_core.config import RunConfig
from sf_core.reports.pictures import draw_timeline
from sf_core.reports.view import open_run
from sf_core.scheduling.simulation.fleet import Turn
from sf_core.scheduling.simulation.simulator import Failures, Turns
from sf_core.scheduling.simulation.variants import VARIANTS, Devices, draw, figures_of, simulate_variant
from storage.files import write_atomic
from storage.trajectories import read_trajectories


class MeasuredLengths:
    """Session lengths drawn from the stored sessions of a run; each session counts as one turn of its prompt
    tokens and its sampled tokens.

    Raises ValueError if there is no such run, or it has no iteration yet."""

    def __init__(self, uri: str) -> None:
        sampled, others = Counter[str](), Counter[str]()
        for part in open_run(uri).parts("trains iteration"):
            for row in read_trajectories(part, ["session_id", "loss_mask", "shared_prefix"]).to_pylist():
                session, num_sampled = row["session_id"], sum(row["loss_mask"])
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
    picture: str | None = None,
) -> Table:
    """Table of all simulated pipelines; the timeline of the multiplexed one is drawn to `picture`.

    Raises ValueError, one sentence, if the devices or iterations are too few."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("pipeline", "tokens/s", "s/iteration", "idle", "max lag", "switches"):
        table.add_column(name, justify="left" if name == "pipeline" else "right")
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
        )
        if picture is not None and name == "multiplexed":
            last = simulated.iterations[-6:]
            first = len(simulated.iterations) - len(last)
            windows = {first + i: (iteration.start, iteration.end) for i, iteration in enumerate(last)}
            spans = simulated.spans
            drawn = draw_timeline(title="multiplexed, simulated", spans=spans, iterations=windows)
            write_atomic(picture, drawn)
    return table
