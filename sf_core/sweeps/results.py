"""What the runs of a sweep have come to, run by run and setting by setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from sf_core.reports.states import is_finished
from sf_core.reports.view import RunView
from sf_core.sweeps.statistics import Mean
from sf_core.sweeps.sweep import OpenSweep, Setting, SweepRun

RunState = Literal["finished", "failed", "unfinished"]


@dataclass(frozen=True, slots=True)
class RunResult:
    run_id: str
    setting: str
    """Label of its setting."""
    seed: int
    state: RunState
    iterations: int
    """Number of iterations that are through."""
    of_iterations: int
    failure: str | None = None
    before: float | None = None
    """Held-out reward before the first iteration."""
    reward: float | None = None
    """Held-out reward after the last iteration."""
    tokens: float | None = None
    """Number of tokens sampled."""
    seconds: float | None = None
    """Time of the iterations, without the time between two attempts."""

    @property
    def progress(self) -> str:
        return f"{self.iterations} of {self.of_iterations} iterations"


@dataclass(frozen=True, slots=True)
class SettingResult:
    """A setting over the seeds whose runs are finished."""

    setting: Setting
    runs: tuple[RunResult, ...]

    def mean(self, figure: str) -> Mean | None:
        return Mean.over([*self.values(figure)])

    def values(self, figure: str) -> list[float]:
        values = (getattr(run, figure) for run in self.finished)
        return [value for value in values if value is not None]

    @property
    def finished(self) -> list[RunResult]:
        return [run for run in self.runs if run.state == "finished"]


def read_results(opened: OpenSweep) -> list[SettingResult]:
    """The settings in their order, each with all of its runs. Raises ValueError if a file of a run is
    broken."""
    failures = opened.folder.read_failures()
    runs = [read_result(opened, run, failures) for run in opened.sweep.runs]
    return [
        SettingResult(setting, tuple(run for run in runs if run.setting == setting.label))
        for setting in opened.sweep.settings
    ]


def read_result(opened: OpenSweep, run: SweepRun, failures: Mapping[str, str]) -> RunResult:
    directory = opened.directory(run)
    due = int(run.config["train"]["iterations"])
    failure = failures.get(run.run_id)
    begun = RunResult(
        run_id=run.run_id,
        setting=run.setting,
        seed=run.seed,
        state="unfinished" if failure is None else "failed",
        iterations=0,
        of_iterations=due,
        failure=failure,
    )
    if not directory.exists():
        return begun
    view = RunView(directory)
    if not is_finished(view, due):
        return replace(begun, iterations=view.progress().published)
    summary = directory.read_summary() or {}
    return replace(
        begun,
        state="finished",
        failure=None,
        iterations=due,
        before=summary.get("reward_before"),
        reward=summary.get("reward_after"),
        tokens=summary.get("tokens_sampled"),
        seconds=summary.get("seconds_rl"),
    )


def unfinished(opened: OpenSweep) -> list[SweepRun]:
    """The runs that are left, in their order; those that failed are tried again."""
    return [run for run in opened.sweep.runs if read_result(opened, run, {}).state != "finished"]


def count_states(results: Sequence[SettingResult]) -> dict[RunState, int]:
    counts: dict[RunState, int] = {"finished": 0, "failed": 0, "unfinished": 0}
    for result in results:
        for run in result.runs:
            counts[run.state] += 1
    return counts


def describe_states(results: Sequence[SettingResult]) -> str:
    """
    >>> describe_states([])
    '0 of 0 runs are finished'
    """
    counts = count_states(results)
    parts = [f"{counts['finished']} of {sum(counts.values())} runs are finished"]
    if counts["failed"]:
        parts.append(f"{counts['failed']} failed")
    if refused := sum(result.setting.fault is not None for result in results):
        parts.append(f"{refused} {'setting was' if refused == 1 else 'settings were'} refused")
    return ", ".join(parts)
