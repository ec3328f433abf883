"""The runs of a sweep in a flow run: one child per run, as many at a time as there are shares of workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from prefect import Flow

from sf_core.reports.log_lines import log_progress
from sf_core.scheduling.cluster import find_workers
from sf_core.sweeps.results import read_result
from sf_core.sweeps.shares import Share, describe_shares, divide
from sf_core.sweeps.sweep import OpenSweep, SweepRun
from tasks.children import STARTS, Child, crash_left_children, end_children, failure_of, start_child
from tasks.cluster import scheduler_address

LOOK_S = 0.5
"""Interval of looks for children that have ended."""


class Runs:
    """The children of a sweep. Its methods must be called in the main thread (tasks/children.py)."""

    def __init__(
        self,
        flow: Flow[Any, Any],
        opened: OpenSweep,
        at_once: int | None,
        changed: Callable[[Sequence[str]], None],
    ) -> None:
        """`changed` is called with the names of the runs that compute, whenever they change."""
        self._flow = flow
        self._opened = opened
        self._changed = changed
        workers = find_workers(opened.configs[0], scheduler_address())
        self._shares = divide(workers, opened.configs, at_once)
        self._children: dict[Share, Child] = {}
        self._runs: dict[str, SweepRun] = {run.run_id: run for run in opened.sweep.runs}
        self._num_begun = 0

    def __enter__(self) -> Runs:
        crash_left_children()
        log_progress(f"sweep {self._opened.sweep.name}: {describe_shares(self._shares)}")
        return self

    def __exit__(self, *_: object) -> None:
        end_children([*self._children.values()])

    def start(self, run: SweepRun, left: int) -> None:
        """Start a run as soon as a share is free; `left` is the number of runs that this flow starts."""
        self._await_below(len(self._shares))
        share = next(share for share in self._shares if share not in self._children)
        self._num_begun += 1
        log_progress(f"{run.run_id} begins, run {self._num_begun} of {left}")
        self._begin(share, self._opened.config(run))

    def await_all(self) -> None:
        self._await_below(1)

    def _begin(self, share: Share, config: Any, starts: int = 1) -> None:
        only = share if len(self._shares) > 1 else None
        self._children[share] = start_child(self._flow, config, only, starts)
        self._tell_changed()

    def _await_below(self, number: int) -> None:
        """Return when fewer children than this compute."""
        while len(self._children) >= number:
            for share, child in list(self._children.items()):
                if child.process.poll() is not None:
                    del self._children[share]
                    self._settle(share, child)
            time.sleep(LOOK_S if self._children else 0.0)

    def _settle(self, share: Share, child: Child) -> None:
        """Note how a child ended; one that crashed is started again."""
        result = read_result(self._opened, self._runs[child.run_id], {})
        if result.state == "finished":
            self._opened.folder.note_end(child.run_id, None)
            log_progress(
                f"{child.run_id} is finished: held-out {_reward(result.before)} → {_reward(result.reward)} "
                f"in {result.seconds or 0:.0f} s"
            )
            return self._tell_changed()
        failure, has_crashed = failure_of(child)
        if has_crashed and child.starts < STARTS:
            log_progress(f"{child.run_id} crashed and is started again: {failure}")
            return self._begin(share, child.config, child.starts + 1)
        self._opened.folder.note_end(child.run_id, failure)
        log_progress(f"{child.run_id} failed: {failure}")
        self._tell_changed()

    def _tell_changed(self) -> None:
        self._changed([child.run_id for child in self._children.values()])


def _reward(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
