"""The figures of a run, each read or computed in one place: tables, pages and pictures only draw them.

Figures of devices are recorded once per iteration, as metrics, because they take all spans of its time.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow.compute as pc

from sf_core.config import RunConfig
from sf_core.config.failures import sum_failures
from sf_core.reports.view import Iteration, RunView, SessionSet, failures_of, runners_of
from sf_core.scheduling.figures import DeviceFigures, device_figures
from sf_core.scheduling.timeline import MAX_UNWRITTEN_S, Span, read_spans
from sf_core.stopwatch import Window
from storage import files
from storage.run_directory import RunDirectory
from storage.tables.metrics import read_metrics, write_metrics
from storage.tables.schema import NOT_SAMPLED

DeviceRow = dict[str, float]
"""Recorded figures of the devices in one iteration, by name."""


@dataclass(frozen=True, slots=True)
class RolloutFigures:
    """Figures of the trajectories of one iteration."""

    sessions: int
    reward_mean: float
    tokens_sampled: int
    lag_mean: float
    """Mean over sampled tokens of the version being updated minus the version that sampled the token."""
    lag_max: int
    example: str
    """The id of one session."""
    failures: dict[str, int]
    """Numbers of failed sessions that count, by the reason."""


class RunSeries:
    """The figures of a run's iterations `first` to `last`. Each series is read when it is first asked for,
    from what is committed then."""

    def __init__(self, view: RunView, first: int = 0, last: int | None = None) -> None:
        self.view = view
        self.run = view.run
        found = view.iterations(first)
        self.iterations = [i for i in found if last is None or i.number <= last]
        """Iterations with a committed stage, in order."""
        self.through = [i for i in self.iterations if i.is_through]
        self._versions = range(first, first + len(self.iterations) + 1)

    @cached_property
    def config(self) -> RunConfig:
        return self.run.read_config(RunConfig)

    @property
    def windows(self) -> dict[int, Window]:
        """Windows of the iterations that are through, by number."""
        return {iteration.number: iteration.window for iteration in self.through}

    @cached_property
    def held_out(self) -> dict[int, float]:
        """Mean held-out reward by policy version. Iteration k makes version k + 1."""
        return self.view.read_held_out(self._versions)

    @cached_property
    def rollouts(self) -> dict[int, RolloutFigures]:
        """Figures of trajectories by iteration. Raises ValueError if a file is missing or broken."""
        found = ((i, self.view.find_session_set(i.number, "rollout")) for i in self.iterations)
        return {i.number: _read_rollout(i, sampling) for i, sampling in found if sampling is not None}

    @cached_property
    def devices(self) -> dict[int, DeviceRow]:
        """The recorded figures of devices by iteration."""
        return read_devices(self.run, (iteration.number for iteration in self.iterations))

    @cached_property
    def spans(self) -> list[Span]:
        """What the devices did, by worker and time."""
        return read_spans(self.run)

    @property
    def tokens_sampled(self) -> int:
        """Tokens that engines sampled, whatever became of them."""
        return sum(span.tokens for span in self.spans)

    @property
    def failures(self) -> dict[str, int]:
        """Numbers of failed training sessions that count, by the reason."""
        return sum_failures(
            failures_of(i.stages["rollout"]) for i in self.iterations if "rollout" in i.stages
        )

    def count_reports(self, kind: str) -> int:
        """Reports of this kind on sessions that had ended (`late_reports`, `refused_reports`)."""
        return sum(i.stages["rollout"].data.get(kind, 0) for i in self.iterations if "rollout" in i.stages)

    @property
    def runners(self) -> dict[str, dict[str, float]]:
        """CPU seconds of each worker of agents, and sessions that have ended there."""
        total: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for iteration in self.iterations:
            if (rollout := iteration.stages.get("rollout")) is not None:
                for name, spent in runners_of(rollout.data).items():
                    total[name].update(spent)
        return {
            name: {
                "sessions": spent["num_ended"],
                "cpu_s": round(spent["cpu_s"], 3),
                "cpu_s_per_session": round(spent["cpu_s"] / max(1, spent["num_ended"]), 5),
            }
            for name, spent in total.items()
        }

    @property
    def held_out_failures(self) -> dict[str, int]:
        """Numbers of failed held-out sessions, by the reason."""
        manifests = (self.view.manifest(version, "evaluate") for version in self._versions)
        return sum_failures(failures_of(manifest) for manifest in manifests if manifest is not None)

    def count_sampled(self, number: int) -> float | None:
        """Tokens that all devices sampled in an iteration's window, whatever became of them; None where
        nothing is recorded."""
        row = self.devices.get(number)
        return None if row is None else row["tokens_rollout_only"] + row["tokens_lent"]


def read_devices(run: RunDirectory, numbers: Iterable[int]) -> dict[int, DeviceRow]:
    """What `record_devices` has written of these iterations, by iteration."""
    uris = {number: run.metrics_file("devices", number) for number in numbers}
    return {number: read_metrics(uri)[0] for number, uri in uris.items() if files.exists(uri)}


def record_devices(view: RunView, newest: int, *, is_over: bool = False) -> None:
    """Write the figures of every iteration up to `newest` that has none yet and is settled, which means that
    its devices have written all spans in it.

    Engines write spans when they load weights, every 15 s and at the end. So an iteration is settled when the
    next one is published, when twice that time has passed, or when the run is over."""
    run = view.run
    first = newest + 1
    while first > 0 and not files.exists(run.metrics_file("devices", first - 1)):
        first -= 1
    # the iteration before tells which tags the devices had before the first
    windows = RunSeries(view, max(0, first - 1)).windows
    due = [
        number
        for number, (_, end) in windows.items()
        if first <= number <= newest
        and (is_over or number < max(windows) or time.time() - end > 2 * MAX_UNWRITTEN_S)
    ]
    if not due:
        return
    spans = read_spans(run, since=windows[min(windows)][0])
    num_lags = run.read_config(RunConfig).lag_bound + 1
    for number in due:
        lags = view.iteration(number).stages["filter"].data.get("lags", [])
        lags = [*lags, *[0] * (num_lags - len(lags))]
        write_metrics(run, "devices", number, [_device_row(device_figures(spans, windows[number]), lags)])


def _read_rollout(iteration: Iteration, sampling: SessionSet) -> RolloutFigures:
    table = sampling.read(["session_id", "loss_mask", "policy_versions"])
    ids = np.unique(table["session_id"].to_numpy())
    mask = pc.list_flatten(table["loss_mask"]).to_numpy()
    versions = pc.list_flatten(table["policy_versions"]).fill_null(NOT_SAMPLED).to_numpy()
    lags = iteration.number - versions[mask]
    return RolloutFigures(
        sessions=len(ids),
        reward_mean=iteration.reward,
        tokens_sampled=len(lags),
        lag_mean=float(lags.mean()) if len(lags) else 0.0,
        lag_max=int(lags.max(initial=0)),
        example=str(ids[0]),
        failures=failures_of(iteration.stages["rollout"]),
    )


def _device_row(figures: DeviceFigures, lags: Sequence[int]) -> DeviceRow:
    row: DeviceRow = {"seconds": figures.seconds}
    row |= {f"idle_{worker}": share for worker, share in figures.idle.items()}
    row |= {f"loading_{worker}": share for worker, share in figures.loading.items()}
    row |= {
        "utilisation_train": figures.utilisation_train,
        "utilisation_rollout": figures.utilisation_rollout,
        "utilisation_cluster": figures.utilisation_cluster,
        "switches": len(figures.switches),
        "not_lent_cost": figures.not_lent["cost"],
        "not_lent_bound": figures.not_lent["bound"],
    }
    for name, costs in (("to_train", figures.costs_s("train")), ("to_rollout", figures.costs_s("rollout"))):
        row[f"{name}_mean_s"] = sum(costs) / len(costs) if costs else float("nan")
        row[f"{name}_max_s"] = max(costs, default=float("nan"))
    row |= {"tokens_rollout_only": figures.tokens_rollout_only, "tokens_lent": figures.tokens_lent}
    return row | {f"lag_{lag}": number for lag, number in enumerate(lags)}
