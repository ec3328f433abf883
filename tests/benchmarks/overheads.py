"""Overheads measured in a run, for a comparison with the simulator."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from benchmarks.emulation.device_model import DeviceModel
from benchmarks.simulation.overheads import Overheads
from sf_core.config import RunConfig
from sf_core.reports.view import RunView
from sf_core.scheduling.figures import by_worker
from sf_core.scheduling.timeline import read_spans
from storage.manifests import Manifest
from storage.run_directory import RunDirectory


def measured_overheads(run: RunDirectory) -> Overheads:
    """Overheads of a run, from its manifests and timelines: medians over its iterations, because a device
    that was still loading when its lease was revoked, or was lent later, distorts them.

    Raises ValueError for a run without two whole iterations."""
    iterations = [iteration.stages for iteration in RunView(run).iterations if iteration.is_complete]
    if len(iterations) < 2:
        raise ValueError(f"{run.run_id} has no two whole iterations to measure")
    model = DeviceModel(run.read_config(RunConfig).emulation)

    def median_s(before: str, after: str, shift: int = 0) -> float:
        """Seconds from the end of one stage to the start of the other, `shift` iterations later."""
        pairs = zip(iterations, iterations[shift:], strict=False)
        return float(
            np.median([b[after].data["started_at"] - a[before].data["finished_at"] for a, b in pairs])
        )

    def seconds_of(stage: str) -> float:
        times = [i[stage].data["finished_at"] - i[stage].data["started_at"] for i in iterations]
        return float(np.median(times))

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
        seal=float(np.median([sealing_s(stages["rollout"]) for stages in iterations]))
        + median_s("rollout", "filter")
        + seconds_of("filter"),
        hand_over=median_s("filter", "train"),
        lease=float(np.median(leases)) if leases else 0.0,
        publish=max(0.0, median_s("train", "publish") + seconds_of("publish") - model.weight_load_s()),
        next_iteration=median_s("publish", "rollout", shift=1),
    )
