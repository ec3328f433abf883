"""The runs of a sweep in a flow run, as many at a time as there are shares of workers: one child per run, in
a process of its own.

A child is a flow run below its parent, as a subflow would be. It has its own process, because runs in one
process would share logs, signals and settings, and a run that dies must die alone.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
from prefect import Flow, Task
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterParentFlowRunId
from prefect.client.schemas.objects import State
from prefect.exceptions import PrefectException
from prefect.runtime import flow_run
from prefect.states import Crashed, Pending

from sf_core.config import RunConfig
from sf_core.process.child_processes import FLOW_RUN, end_with
from sf_core.process.import_path import module_environment, python_module
from sf_core.reports.log_lines import log_progress
from sf_core.scheduling.cluster import find_workers
from sf_core.stages.sweeps.results import read_result
from sf_core.stages.sweeps.sweep import OpenSweep, Share, SweepRun, describe_shares, divide
from storage.local import open_own
from storage.run_directory import RunDirectory
from tasks.cluster import scheduler_address

STARTS = 3
"""Maximum number of starts of a child that crashes: of one that fails, there is one."""

END_S = 25.0
"""Time for children to free their workers. A process worker kills a flow 30 s after it has told it to end."""

RAISED = ("Flow run encountered an exception: ", "Execution was aborted by an unexpected exception: ")
"""What Prefect writes in front of the error of a flow."""


@dataclass
class Child:
    """A child that has begun."""

    config: RunConfig
    share: tuple[str, ...] | None
    """The workers that it may use; None: all."""
    flow_run_id: UUID
    process: subprocess.Popen[bytes]
    log: Path
    starts: int = 1

    @property
    def run_id(self) -> str:
        return str(self.config.run_id)


def start_child(
    flow: Flow[Any, Any], config: RunConfig, share: tuple[str, ...] | None, starts: int = 1
) -> Child:
    """Start the flow with this configuration below the current flow run. Must be called in the main thread: a
    child is ended with the thread that started it."""
    with get_client(sync_client=True) as client:
        parent = UUID(flow_run.id)
        task = Task(name=str(config.run_id), fn=flow.fn)
        task_run = client.create_task_run(task, parent, dynamic_key=str(uuid4()), state=Pending())
        made = client.create_flow_run(
            flow,
            name=str(config.run_id),
            parameters={"config": config.model_dump(mode="json")},
            tags=flow_run.tags,
            parent_task_run_id=task_run.id,
        )
    log = Path(RunDirectory(config.run_dir).local_dir, "logs", f"flow-{flow.name}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    # the folder of a run may be one into which others write
    with open(log, "ab", opener=open_own) as output:
        process = subprocess.Popen(
            python_module("prefect.flow_engine", f"{flow.fn.__module__}:{flow.fn.__name__}"),
            env=_environment(made.id, share),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            preexec_fn=partial(end_with, os.getpid()),
        )
    return Child(config, share, made.id, process, log, starts)


def _environment(flow_run_id: UUID, share: tuple[str, ...] | None) -> Mapping[str, str]:
    variables = {FLOW_RUN: str(flow_run_id), "SF_STARTED_AT": str(time.time())}
    if share is not None:
        variables["SF_WORKERS"] = ",".join(share)
    for name, value in module_environment().items():
        # what Prefect tells one flow process: the flow run of the parent, and how its worker reaches it
        if not name.startswith("PREFECT__"):
            variables.setdefault(name, value)
    return variables


def failure_of(child: Child) -> tuple[str, bool]:
    """Why a child whose process has ended has not done its work, and whether it only crashed: then it may be
    started again."""
    state = None
    with suppress(httpx.HTTPError, PrefectException), get_client(sync_client=True) as client:
        state = client.read_flow_run(child.flow_run_id).state
        if state is not None and not state.is_final():
            client.set_flow_run_state(child.flow_run_id, _gone(child.process.returncode), force=True)
    return f"{_reason(state, child.process.returncode)}; log: {child.log}", not _has_failed(state)


def _has_failed(state: State[Any] | None) -> bool:
    return state is not None and (state.is_failed() or state.is_cancelled())


def _reason(state: State[Any] | None, code: int) -> str:
    if state is None or not state.is_final() or not state.message:
        return f"its process ended with code {code}"
    message = state.message
    for words in RAISED:
        message = message.removeprefix(words)
    return " ".join(message.split()).removesuffix(".")


def _gone(code: int | None) -> State[Any]:
    return Crashed(message=f"its process ended with code {code}")


def crash_left_children() -> None:
    """Set the children to Crashed that an earlier process of this flow run has left: they ended with it, and
    would stay Running for ever."""
    mine = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[UUID(flow_run.id)]))
    with get_client(sync_client=True) as client:
        for left in client.read_flow_runs(flow_run_filter=mine):
            if left.state is None or not left.state.is_final():
                ended: State[Any] = Crashed(message="the process of the sweep ended, and this run with it")
                client.set_flow_run_state(left.id, ended, force=True)


def end_children(children: list[Child]) -> None:
    """End them all, first with time to free their workers."""
    for child in children:
        child.process.terminate()
    deadline = time.monotonic() + END_S
    for child in children:
        try:
            child.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()


LOOK_S = 0.5
"""Interval of looks for children that have ended."""


class Runs:
    """The children of a sweep. Its methods must be called in the main thread (tasks/sweeping.py)."""

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
