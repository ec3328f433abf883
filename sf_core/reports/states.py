"""States of runs: how far each run is, its size, and whether a flow works on it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

import httpx

from sf_core.config import RunConfig
from sf_core.config.addresses import is_loopback
from sf_core.dataplane.control.client import DataplaneClient, DataplaneError
from sf_core.dataplane.operator_key import operator_key
from sf_core.process.environment_variables import command_started_at
from sf_core.reports.view import NewestFigures, RunView
from storage import files
from storage.errors import StorageError
from storage.run_directory import RunDirectory

STATUS_S = 5.0
"""How long a data plane may take to answer."""

RESTART_S = 20.0
"""A data plane that died is started again within this time, also on a busy machine."""

LOOK_S = 1.0


State = Literal["finished", "running", "stopped", "unknown", "unreadable"]
"""unknown: not finished, and not known whether a flow works on it; unreadable: a file cannot be read."""


class BusyError(ValueError):
    """A flow works on the run, or it is unknown if a flow does."""


@dataclass(frozen=True, slots=True)
class ListedRun:
    name: str
    state: State
    progress: NewestFigures
    iterations: int | None
    """Configured number of iterations; None if the run cannot be read."""
    bytes: int
    fault: str | None = None
    """Why the run cannot be read."""


def find_runs(root: str) -> list[RunDirectory]:
    """The runs in a folder, or the folder itself if it is one. Raises ValueError if there is none."""
    itself = RunDirectory(root)
    if itself.exists():
        return [itself]
    runs = [run for run in map(RunDirectory, files.list_folders(itself.uri)) if run.exists()]
    if not runs and not files.exists(itself.uri):
        # names the runs in the folder above
        RunView.open(root)
    if not runs:
        raise ValueError(
            f"{root}: no runs here (no folders with a config.json); name a run or its storage.root"
        )
    return runs


def run_state(run: RunDirectory) -> ListedRun:
    size = files.folder_bytes(run.uri)
    view = RunView(run)
    try:
        iterations = run.read_config(RunConfig).train.iterations
        reached = view.progress()
        state: State = "finished" if is_finished(view, iterations) else _activity(run)
    except (ValueError, StorageError) as error:
        return ListedRun(run.run_id, "unreadable", NewestFigures(0, None, None), None, size, str(error))
    return ListedRun(run.run_id, state, reached, iterations, size)


def _activity(run: RunDirectory) -> Literal["running", "stopped", "unknown"]:
    try:
        return "running" if dataplane_state(run) == "running" else "stopped"
    except BusyError:
        return "unknown"


def is_finished(view: RunView, iterations: int) -> bool:
    """Whether this many iterations are committed and in the summary, which may be older than an extension of
    the run. Raises ValueError if a file is broken."""
    run = view.run
    summary = run.read_summary()
    in_summary = 0 if summary is None else summary.get("iterations", 0)
    if not isinstance(in_summary, int):
        raise ValueError(
            f"{run.path('summary.json')}: the field iterations must be an integer, got {in_summary!r}"
        )
    return in_summary >= iterations and view.progress().published >= iterations


def await_restarts(runs: Iterable[RunDirectory], tell: Callable[[str], None]) -> None:
    """Wait for data planes that may be restarting, because a run whose data plane is briefly away would count
    as idle. Returns at once if all answer, else calls `tell` first. Ignores finished runs."""
    silent = [run for run in runs if _does_not_answer(run)]
    # if a command started this flow, the command has waited already
    now = time.time()
    left_s = RESTART_S - max(0.0, now - (command_started_at() or now))
    if silent and left_s > 0:
        names = ", ".join(run.run_id for run in silent)
        tell(f"{names}: the data plane does not answer and may be restarting; waiting for {left_s:.0f} s")
    deadline = time.monotonic() + left_s
    while silent and time.monotonic() < deadline:
        time.sleep(min(LOOK_S, left_s))
        silent = [run for run in silent if _does_not_answer(run)]


def check_idle(run: RunDirectory) -> None:
    """Raises BusyError if a flow works on the run, or if that is unknown; ValueError if a file is broken."""
    if dataplane_state(run) == "running":
        raise BusyError(f"{run.run_id}: the run is in use; stop it or wait until it ends")


def dataplane_state(run: RunDirectory) -> Literal["absent", "released", "running"]:
    """The state of the run in the data plane of the newest attempt. absent: the data plane is gone, or does
    not know the run; released: the data plane has released the run; running: a flow works on the run.

    Raises BusyError with one sentence if the data plane cannot be asked or does not answer."""
    answer = _ask_dataplane(run)
    return "absent" if answer == "silent" else answer


def _does_not_answer(run: RunDirectory) -> bool:
    try:
        config = run.read_config(RunConfig)
        return not is_finished(RunView(run), config.train.iterations) and _ask_dataplane(run) == "silent"
    except ValueError:
        # the caller's next read raises it
        return False


def _ask_dataplane(run: RunDirectory) -> Literal["silent", "absent", "released", "running"]:
    """See `dataplane_state`; silent: nothing at the address of the data plane speaks HTTP."""
    attempt = run.newest_attempt()
    url = attempt.dataplane
    if not url:
        return "absent"
    if attempt.host not in (None, socket.gethostname()) and is_loopback(urlsplit(url).hostname or ""):
        raise _unknown_state_error(run, url, f"is on {attempt.host}; run the command there")
    client = DataplaneClient(url, run.run_id, operator_key(url), patience_s=0.0, timeout_s=STATUS_S)
    try:
        status = client.status()
        if _is_elsewhere(run, status["run_dir"]):
            return "absent"
        return "released" if status["released"] else "running"
    except DataplaneError as error:
        if error.status in (401, 403):
            raise _unknown_state_error(run, url, f"refused the key ({error})") from None
        if error.status >= 500:
            raise _unknown_state_error(run, url, f"fails ({error}); try again") from None
        return "absent"
    except (httpx.TimeoutException, httpx.ConnectError) as error:
        if not _is_refused(error):
            # it may be busy, or the network is at fault
            raise _unknown_state_error(
                run, url, f"cannot be reached ({error.__cause__}); try again"
            ) from None
        return "silent"
    except httpx.TransportError:
        return "silent"
    except (httpx.HTTPError, ValueError, KeyError):
        # something else has its port now
        return "absent"


def _is_refused(error: BaseException | None) -> bool:
    """Whether the machine was reached and refused the connection."""
    while error is not None and not isinstance(error, ConnectionRefusedError):
        error = error.__cause__ or error.__context__
    return error is not None


def _unknown_state_error(run: RunDirectory, url: str, why: str) -> BusyError:
    return BusyError(
        f"{run.run_id}: it is unknown if the run is in use: its data plane at {url} {why}, or if this "
        f'data plane is gone for good, write {{"dataplane": ""}} into {run.newest_attempt_file()}'
    )


def _is_elsewhere(run: RunDirectory, run_dir: str) -> bool:
    """Whether the data plane serves another directory: this one is a copy, or only has the same name."""
    if run_dir == run.uri:
        return False
    if "://" in run_dir or "://" in run.uri:
        return True
    # a path missing here may be this folder, mounted elsewhere on the data plane's host
    return os.path.exists(run_dir) and not os.path.samefile(run_dir, run.uri)
