"""Runs as children of a flow run: each in a process of its own, on a share of the workers.

A child is a flow run below its parent, as a subflow would be. It has its own process, because runs in one
process would share logs, signals and settings, and a run that dies must die alone.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping
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

from sf_core.child_processes import FLOW_RUN, end_with
from sf_core.config import RunConfig
from sf_core.import_path import module_environment, python_module
from storage.local.opening import open_own
from storage.run_directory import RunDirectory

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
