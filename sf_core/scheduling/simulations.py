"""The pipelines side by side on the same simulated devices, prompts and lengths. Behind `sf simulate`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import pyarrow.compute as pc
from rich.table import Table

from sf_core.config import RunConfig
from sf_core.iterations import read_iterations
from sf_core.picture import draw_timeline
from sf_core.report import open_run
from sf_core.scheduling.device_model import DeviceModel
from sf_core.scheduling.figures import by_worker, device_figures
from sf_core.scheduling.pipelines import PipelineName
from sf_core.scheduling.plan import Worker, make_plan
from sf_core.scheduling.roofline import Device, known_device
from sf_core.scheduling.simulator import Failures, Length, Overheads, Simulated, simulate
from sf_core.scheduling.timeline import read_spans
from storage.files import write_atomic
from storage.manifests import Manifest
from storage.run_directory import RunDirectory
from storage.trajectories import read_trajectories

BLOCK = 16
"""Members of a group that draw from one generator: one for each would cost more than the simulation."""

WARMUP = 2
"""Iterations that are not counted: the first has none to overlap with, and no switch was measured before."""


class Variant(NamedTuple):
    pipeline: PipelineName
    overlap: bool


VARIANTS = {
    "colocated": Variant("colocated", overlap=True),
    "colocated_drained": Variant("colocated", overlap=False),
    "disaggregated": Variant("disaggregated", overlap=False),
    "async": Variant("async", overlap=True),
    "multiplexed": Variant("multiplexed", overlap=True),
}
"""The pipelines. colocated: sessions that a train step cuts go on after it (partial rollout).
colocated_drained: every session ends before the train step, as common frameworks have it."""


@dataclass(frozen=True, slots=True)
class Devices:
    """A cluster: of its devices, `dual` can train and roll out, the others only roll out. Colocated pipelines
    have as many devices, all of them dual. Kinds are names of roofline.DEVICES; None: the device of the
    configuration's `emulation`."""

    rollout: int
    dual: int
    rollout_kind: str | None = None
    dual_kind: str | None = None

    def workers_of(self, variant: Variant) -> list[Worker]:
        """Raises ValueError for a kind that is not known."""
        dual = frozenset(("rollout", "train"))
        others = dual if variant.pipeline == "colocated" else frozenset(("rollout",))
        return [
            *(Worker(f"t{i}", dual, _device(self.dual_kind)) for i in range(self.dual)),
            *(Worker(f"r{i}", others, _device(self.rollout_kind)) for i in range(self.rollout)),
            Worker("a0", frozenset(("agent",))),
            Worker("c0", frozenset(("cpu",))),
        ]


def _device(kind: str | None) -> Device | None:
    return known_device(kind) if kind else None


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Lengths with a heavy tail, the same in every run: median x exp(sigma x normal), cut at `longest`."""

    prompt: int
    median: float
    sigma: float
    longest: int

    def __call__(self, group: int, member: int) -> tuple[int, int]:
        length = self.median * math.exp(self.sigma * _NORMAL.inv_cdf(_draw(group, member)))
        return self.prompt, round(min(max(length, 1), self.longest))


def lognormal_for(config: RunConfig, *, prompt: int, median: float, sigma: float) -> Lognormal:
    """Lengths that the run could have: cut at `rollout.max_tokens`.

    Raises ValueError, one sentence, if that cuts most sessions to one length, which would compare nothing, or
    if an engine has no room for the longest."""
    budget, room = config.rollout.max_tokens, config.engine.context_length
    if median > budget:
        raise ValueError(
            f"rollout.max_tokens ({budget}) would cut most sessions to one length, as their median is "
            f"{median:g} tokens: set it to several times that, or --median lower"
        )
    if prompt + budget > room:
        raise ValueError(
            f"engine.context_length ({room}) has no room for a prompt of {prompt} tokens and "
            f"rollout.max_tokens ({budget}): set it to {prompt + budget} or more, or --prompt lower"
        )
    return Lognormal(prompt, median, sigma, budget)


_NORMAL = NormalDist()


def _draw(group: int, member: int) -> float:
    """Uniform in (0, 1), the same in every run."""
    return _draws(group, member // BLOCK)[member % BLOCK]


@lru_cache(maxsize=1024)
def _draws(group: int, block: int) -> list[float]:
    draws = np.random.default_rng((group, block)).uniform(2**-53, 1.0, BLOCK)
    return list(map(float, draws))


class MeasuredLengths:
    """Drawn from the sessions of a run: prompt tokens and sampled tokens of each, as its Parquet has them.

    Raises ValueError if there is no such run, or it has no iteration yet."""

    def __init__(self, uri: str) -> None:
        run = open_run(uri)
        sampled: dict[str, int] = {}
        others: dict[str, int] = {}
        iteration = 0
        while (manifest := run.read_manifest(iteration, "rollout")) is not None:
            for output in manifest.outputs:
                for session, num_others, num_sampled in _lengths_in(run.path(output.uri)):
                    sampled[session] = sampled.get(session, 0) + num_sampled
                    others[session] = others.get(session, 0) + num_others
            iteration += 1
        if not sampled:
            raise ValueError(f"{uri}: no iteration was rolled out, so no lengths were measured")
        self._lengths = [(others[session], max(1, sampled[session])) for session in sorted(sampled)]

    def __call__(self, group: int, member: int) -> tuple[int, int]:
        return self._lengths[int(_draw(group, member) * len(self._lengths))]


def _lengths_in(uri: str) -> Iterator[tuple[str, int, int]]:
    """Of every row: session, tokens that were neither sampled nor in its parent branch, sampled tokens."""
    columns = ["session_id", "token_ids", "loss_mask", "shared_prefix"]
    table = read_trajectories(uri, columns)
    lengths = pc.list_value_length(table["token_ids"]).to_pylist()
    for session, length, mask, shared in zip(
        table["session_id"].to_pylist(),
        lengths,
        table["loss_mask"].to_pylist(),
        table["shared_prefix"].to_pylist(),
        strict=True,
    ):
        yield session, length - shared - sum(mask), sum(mask)


@dataclass(frozen=True, slots=True)
class PipelineFigures:
    """Of the iterations after the warm-up but the last one, which none overlaps."""

    tokens_per_second: float
    seconds_per_iteration: float
    idle_fraction: float
    max_lag: int
    switches: int
    """Changes of a device's active tag, in both directions."""


def configure(config: RunConfig, variant: Variant, devices: Devices) -> RunConfig:
    """The configuration with this pipeline, and every device that may train a rank."""
    settings = config.model_dump()
    settings["pipeline"] = variant.pipeline
    settings["rollout"]["overlap"] = variant.overlap
    settings["train"]["workers"] = sum("train" in worker.tags for worker in devices.workers_of(variant))
    return RunConfig.model_validate(settings)


def simulate_variant(
    config: RunConfig,
    variant: Variant,
    devices: Devices,
    length: Length,
    *,
    overheads: Overheads | None = None,
    failures: Failures | None = None,
) -> Simulated:
    """Raises ValueError, one sentence, if the pipeline cannot run on these devices."""
    chosen = configure(config, variant, devices)
    workers = devices.workers_of(variant)
    plan = make_plan(workers, chosen)
    by_name = {worker.name: worker.device for worker in workers if worker.device}
    return simulate(chosen, plan, length, devices=by_name, overheads=overheads, failures=failures)


def figures_of(simulated: Simulated) -> PipelineFigures:
    """Raises ValueError for fewer than four iterations: nothing would be left to count."""
    counted = simulated.iterations[WARMUP:-1]
    if not counted:
        raise ValueError(f"train.iterations must be at least {WARMUP + 2} to leave one that is typical")
    window = counted[0].start, counted[-1].end
    found = device_figures(simulated.spans, window)
    return PipelineFigures(
        tokens_per_second=round(sum(iteration.tokens for iteration in counted) / found.seconds, 1),
        seconds_per_iteration=round(found.seconds / len(counted), 3),
        idle_fraction=round(1.0 - found.utilisation_cluster, 4),
        max_lag=max(iteration.max_lag for iteration in counted),
        switches=len(found.switches),
    )


def comparison(
    config: RunConfig,
    devices: Devices,
    length: Length,
    *,
    failures: Failures | None = None,
    picture: str | None = None,
) -> Table:
    """All pipelines in a table; `picture` is where the timeline of the multiplexed one is drawn.

    Raises ValueError, one sentence, if the devices or iterations are too few."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("pipeline", "tokens/s", "s/iteration", "idle", "max lag", "switches"):
        table.add_column(name, justify="left" if name == "pipeline" else "right")
    for name, variant in VARIANTS.items():
        simulated = simulate_variant(config, variant, devices, length, failures=failures)
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


def measured_overheads(run: RunDirectory) -> Overheads:
    """What orchestration took in a run, by its manifests and timelines: means over its iterations.

    Raises ValueError for a run without two whole iterations."""
    iterations = [iteration.stages for iteration in read_iterations(run) if iteration.is_through]
    if len(iterations) < 2:
        raise ValueError(f"{run.run_id} has no two whole iterations to measure")
    load_s = DeviceModel(run.read_config(RunConfig).emulation).weight_load_s()

    def mean_s(before: str, after: str, shift: int = 0) -> float:
        """From the end of one stage to the beginning of the other, so many iterations later."""
        pairs = zip(iterations, iterations[shift:], strict=False)
        return float(np.mean([b[after].data["started_at"] - a[before].data["finished_at"] for a, b in pairs]))

    def seconds_of(stage: str) -> list[float]:
        return [i[stage].data["finished_at"] - i[stage].data["started_at"] for i in iterations]

    def sealing_s(rollout: Manifest) -> float:
        waits = rollout.data.get("waits", ())
        full = max((wait["end"] for wait in waits), default=rollout.data["started_at"])
        return float(rollout.data["finished_at"] - full)

    leases = [
        after.start - before.end
        for spans in by_worker([s for s in read_spans(run) if s.kind == "held"]).values()
        for before, after in pairwise(spans)
        if (before.tag, after.tag) == ("train", "rollout")
    ]
    return Overheads(
        seal=float(np.mean([sealing_s(stages["rollout"]) for stages in iterations]))
        + mean_s("rollout", "filter")
        + float(np.mean(seconds_of("filter"))),
        hand_over=mean_s("filter", "train"),
        lease=float(np.mean(leases)) if leases else 0.0,
        publish=max(0.0, mean_s("train", "publish") + float(np.mean(seconds_of("publish"))) - load_s),
        next_iteration=mean_s("publish", "rollout", shift=1),
    )
