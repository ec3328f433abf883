"""The page of a run or of a sweep in Prefect: artifacts of its flow run, updated in place while it goes on,
and for a run a log line per iteration.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterKey,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.client.schemas.sorting import LogSort
from prefect.runtime import flow_run

from sf_core.dataplane.control.client import DataplaneClient, DataplaneError
from sf_core.dataplane.operator_key import operator_key
from sf_core.reports.log_lines import describe_iteration, find_unlogged, log_progress
from sf_core.reports.run_page import RunPage, waits_table
from sf_core.reports.view import RunView
from sf_core.reports.warnings import iteration_warnings
from sf_core.stages.run import OpenRun, RunRef
from sf_core.stages.sweeps.results import draw, read_results, to_markdown
from sf_core.stages.sweeps.sweep import OpenSweep
from sf_core.waits import Facts, long_waits
from storage.files import write_atomic
from tasks.cluster import is_waiting

log = logging.getLogger(__name__)

QUIET_S = 10.0
"""Longest that a write of the page waits for the flow to wait for a task. Of two simultaneous writers a
Prefect server on SQLite may refuse one (503), and unless the server is ours (tasks/prefect_server.py) the
flow would retry only 2 s later, with its devices idle."""

RENEW_EVERY_S = 5.0
"""A renewal takes about 0.3 s of the interpreter that runs the flow; iterations may be as short as 2 s."""

REPORT_EVERY_S = 60.0
"""The report has pictures, which take half a second to draw: it appears after a minute, or at the end of a
shorter run. The table and the progress bar are renewed with the iterations."""

WAITS_EVERY_S = 30.0

RECENT_LINES = 200
"""Number of log lines among which the line of the last iteration is looked for: the limit of the server."""

KEYS = {"progress": "progress", "iterations": "table", "report": "markdown", "waiting": "markdown"}
"""Artifact types by key. The keys are the same for all runs, or every run would add lines to Prefect's page
of artifacts."""


class Page:
    """Renews the page in a thread of its own: the flow does not wait for it, and a page that cannot be
    written costs the run nothing."""

    def __init__(self, run: RunRef) -> None:
        """Must be called in the flow run that owns the page."""
        self._flow_run_id = UUID(flow_run.id)
        self._run = OpenRun(run)
        self._page = RunPage(self._run.directory)
        self._dataplane = DataplaneClient(
            run.dataplane_url, run.run_id, operator_key(run.dataplane_url), patience_s=0.0
        )
        self._artifacts: dict[str, UUID] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="page")
        self._latest: Future[None] | None = None
        self._newest: int | None = None
        self._renewed_at = float("-inf")
        self._reported_at = time.monotonic()
        self._waits_shown: list[Facts] | None = None
        self._reported: set[str] = set()
        """Kinds of warnings that the log has a line about."""
        self._is_over = threading.Event()

    def __enter__(self) -> Page:
        watch = partial(copy_context().run, self._watch_waits)
        threading.Thread(target=watch, name="waits", daemon=True).start()
        if first := self._run.iterations_left().start:
            self._soon(self._tell_untold, first)
            self._show(first - 1)
        return self

    def iteration_is_through(self, number: int) -> None:
        """Log a line about the iteration and what is new to worry about, and show it on the page soon."""
        self._soon(self._log, number)
        self._show(number)

    def _tell_untold(self, first: int) -> None:
        """Log the lines of earlier iterations that the log lacks. A killed process does not send its last
        lines, and workers may finish an iteration without it."""
        with get_client(sync_client=True) as client:
            mine = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[self._flow_run_id]))
            lines = client.read_logs(mine, limit=RECENT_LINES, sort=LogSort.TIMESTAMP_DESC)
        for number in find_unlogged((line.message for line in lines), first):
            self._log(number)

    def _log(self, number: int) -> None:
        view = RunView(self._run.directory)
        config = self._run.config
        log_progress(describe_iteration(view, number, config.train.iterations))
        for kind, sentence in iteration_warnings(view, number, config).items():
            if kind not in self._reported:
                self._reported.add(kind)
                log_progress(f"iteration {number}: {sentence}")

    def _show(self, number: int) -> None:
        """Renew the page, unless it is being renewed or just was: then the next renewal includes this one."""
        self._newest = number
        is_due = time.monotonic() - self._renewed_at > RENEW_EVERY_S
        if is_due and (self._latest is None or self._latest.done()):
            self._renewed_at = time.monotonic()
            self._latest = self._soon(self._renew, number)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        interrupted = error is not None and not isinstance(error, Exception)
        self._is_over.set()
        if not interrupted:
            if self._newest is not None:
                self._soon(partial(self._renew, is_last=True), self._newest)
            self._soon(self._show_waits, [])
        self._thread.shutdown(wait=not interrupted, cancel_futures=interrupted)

    def _soon(self, change: Callable[..., None], *args: Any) -> Future[None]:
        # Prefect finds the run that a log line belongs to by the context
        return self._thread.submit(copy_context().run, self._try, change, *args)

    def _try(self, change: Callable[..., None], *args: Any) -> None:
        try:
            change(*args)
        except Exception as error:  # the run must not fail with its page, and the next renewal may succeed
            log.warning("the run's page is not up to date: %s: %s", type(error).__name__, error)

    def _renew(self, newest: int, is_last: bool = False) -> None:
        self._page.update(newest)
        self._put("progress", self._page.progress)
        self._put("iterations", json.dumps(self._page.table))
        if is_last or time.monotonic() - self._reported_at > REPORT_EVERY_S:
            self._put("report", self._page.report())
            self._reported_at = time.monotonic()

    def _watch_waits(self) -> None:
        while not self._is_over.wait(WAITS_EVERY_S):
            waits = [wait.facts() for wait in long_waits()]
            with suppress(httpx.HTTPError, DataplaneError):  # reported by the tasks that need the data plane
                waits += filter(None, [self._dataplane.status().get("wait")])
            with suppress(RuntimeError):  # the run has just ended
                self._soon(self._show_waits, waits)

    def _show_waits(self, waits: list[Facts]) -> None:
        if waits != self._waits_shown:
            self._put("waiting", waits_table(waits))
            self._waits_shown = waits

    def _put(self, key: str, data: Any) -> None:
        if not self._is_over.is_set():
            is_waiting.wait(QUIET_S)
        with get_client(sync_client=True) as client:
            if key not in self._artifacts:
                # a flow run that is retried has them already
                mine = ArtifactFilter(
                    key=ArtifactFilterKey(any_=[key]),
                    flow_run_id=ArtifactFilterFlowRunId(any_=[self._flow_run_id]),
                )
                artifacts = client.read_artifacts(artifact_filter=mine)
                if not artifacts:
                    new = ArtifactCreate(key=key, type=KEYS[key], data=data, flow_run_id=self._flow_run_id)
                    self._artifacts[key] = client.create_artifact(new).id
                    return
                self._artifacts[key] = artifacts[0].id
            client.update_artifact(self._artifacts[key], ArtifactUpdate(data=data))


KEY = "sweep"
"""The same for all sweeps, or every sweep would add a line to Prefect's page of artifacts."""


class SweepPage:
    """Written anew whenever a run begins or ends, and its picture as a file too. Must be made in the flow run
    that owns it."""

    def __init__(self, opened: OpenSweep) -> None:
        self._opened = opened
        self._flow_run_id = UUID(flow_run.id)

    def show(self, going_on: Sequence[str] = ()) -> None:
        try:
            self._show(going_on)
        except Exception as error:  # the sweep must not fail with its page, and the next renewal may succeed
            log.warning("the sweep's page is not up to date: %s: %s", type(error).__name__, error)

    def _show(self, going_on: Sequence[str]) -> None:
        results = read_results(self._opened)
        write_atomic(self._opened.folder.path("summary.png"), draw(self._opened, results))
        text = to_markdown(self._opened, results, going_on)
        mine = ArtifactFilter(
            key=ArtifactFilterKey(any_=[KEY]), flow_run_id=ArtifactFilterFlowRunId(any_=[self._flow_run_id])
        )
        with get_client(sync_client=True) as client:
            # a flow run that is retried has it already
            if artifacts := client.read_artifacts(artifact_filter=mine):
                client.update_artifact(artifacts[0].id, ArtifactUpdate(data=text))
            else:
                client.create_artifact(
                    ArtifactCreate(key=KEY, type="markdown", data=text, flow_run_id=self._flow_run_id)
                )
