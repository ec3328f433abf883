"""What a flow still does when it ends, and what it does first for a process that could not. It sends its log
lines, stops the work on the devices, and sets no state if another process works on the same flow run by then.

A flow ends by itself, or is interrupted (Cancel in the UI, end of its process worker or of `sf train`): by a
signal, which raises wherever the flow is, and it is killed 30 s later. Dask drops queued tasks but lets
running ones go on, which would keep their devices, as would an agent that does not end.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from uuid import UUID

import httpx
from distributed import Future
from prefect.client.orchestration import get_client
from prefect.exceptions import Abort, ObjectNotFound
from prefect.logging.handlers import APILogHandler
from prefect.runtime import flow_run

from sf_core.dataplane.control.client import UNANSWERED, DataplaneClient
from sf_core.dataplane.operator_key import operator_key
from sf_core.process.child_processes import FLOW_RUN
from sf_core.scheduling.cluster import end_tasks, owner_of
from sf_core.stages.run import RunRef
from tasks.cluster import dask_client, scheduler_address
from tasks.lost_runs import crash_cut_parts

log = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""Time for running tasks to end by themselves: engines and agents do when their run is released, a train step
may take minutes."""

RELEASE_S = 2.0
"""Time for the data plane to release the run. Without a release nothing ends by itself."""


@contextmanager
def send_logs_at_end() -> Iterator[None]:
    """When the block ends, the Prefect server has its log lines. Prefect sends them together up to two
    seconds later, and a process worker that is removed at once takes the flow's process with it."""
    try:
        yield
    finally:
        APILogHandler().flush()


@contextmanager
def leave_to_successor() -> Iterator[None]:
    """However the block ends, this process sets no state if another one has begun on the flow run by then."""
    try:
        yield
    finally:
        # a subflow has told it already
        if not isinstance(sys.exception(), Abort):
            end_if_taken_over()


def end_if_taken_over() -> None:
    """Raises Abort, with which Prefect ends this process without a state, if another process has begun on the
    flow run. Prefect counts the starts of a flow run, but takes a state from any process: a process that was
    taken for dead would set the flow run to Failed while the other one trains."""
    if FLOW_RUN not in os.environ:
        return
    # a server that does not answer gets no state either
    with suppress(httpx.HTTPError, ObjectNotFound), get_client(sync_client=True) as client:
        starts = client.read_flow_run(flow_run.id).run_count
        if starts > flow_run.run_count:
            log.warning("start %d of this flow run has taken over: this process sets no state", starts)
            raise Abort


def take_over() -> None:
    """Begin in place of an earlier process of this flow run, if there was one: end in Prefect what it left
    unfinished, for example the subflow of an iteration. Raises Abort if a later process has begun."""
    end_if_taken_over()
    if flow_run.run_count < 2:
        return
    try:
        with get_client(sync_client=True) as client:
            crash_cut_parts(client, client.read_flow_run(UUID(flow_run.id)))
    except httpx.HTTPError as error:  # the run does not depend on it
        log.warning("unfinished subflows and tasks of an earlier start stay as they are: %s", error)


@contextmanager
def free_workers_at_end(run: RunRef) -> Iterator[None]:
    """However the block ends, no worker runs anything of this attempt afterwards."""
    try:
        yield
    finally:
        try:
            _free_workers(run)
        except Exception as error:  # the block, not this error, decides how the flow ends
            log.warning("workers may still be busy with the ended flow: %s: %s", type(error).__name__, error)


def _free_workers(run: RunRef) -> None:
    client = dask_client()
    # the flow's own; those of a subflow are cancelled when it ends
    client.cancel([Future(key, client) for key in list(client.futures)])
    _release(run)
    ended = end_tasks(scheduler_address(), owner_of(run.run_id, run.attempt), PATIENCE_S)
    if ended:
        log.warning("tasks still running after %g s are killed: %s", PATIENCE_S, ", ".join(ended))


def _release(run: RunRef) -> None:
    key = operator_key(run.dataplane_url)
    client = DataplaneClient(run.dataplane_url, run.run_id, key, patience_s=RELEASE_S, timeout_s=RELEASE_S)
    # the data plane may be gone, or not know the run yet: then only force is left
    with suppress(*UNANSWERED):
        client.release(run.attempt)
