"""Run directories as a list shows them: how far each is, its size, and whether anybody works on it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import httpx

from sf_core.config import RunConfig
from sf_core.dataplane.client import DataplaneClient, DataplaneError
from sf_core.settings import dataplane_key, dataplane_url
from storage import files
from storage.errors import StorageError
from storage.run_directory import RunDirectory

STATUS_S = 5.0
"""A data plane that takes longer is one that nobody works with."""


State = Literal["finished", "running", "stopped", "unknown", "unreadable"]
"""unknown: whether anybody works on it cannot be told, for example because the data plane wants another key;
unreadable: the configuration or a manifest cannot be read."""


class BusyError(ValueError):
    """The run is being worked on."""


@dataclass(frozen=True, slots=True)
class Progress:
    published: int
    """Iterations that are committed to the end; the newest policy version."""
    reward: float | None
    """Mean of the newest batch."""
    held_out: float | None
    """Mean of the newest evaluation."""


@dataclass(frozen=True, slots=True)
class RunState:
    name: str
    state: State
    progress: Progress
    iterations: int | None
    """As configured; None if the run cannot be read."""
    bytes: int
    fault: str | None = None
    """Why the run cannot be read."""


def find_runs(root: str) -> list[RunDirectory]:
    """The runs in a folder, or the folder itself if it is one. Raises ValueError if there is none."""
    itself = RunDirectory(root)
    if _is_run(itself):
        return [itself]
    runs = [run for run in map(RunDirectory, files.list_folders(itself.uri)) if _is_run(run)]
    if not runs:
        raise ValueError(f"{root}: no runs here (folders with a config.json); name a run or its storage.root")
    return runs


def run_state(run: RunDirectory) -> RunState:
    size = files.folder_bytes(run.uri)
    try:
        iterations, reached = run.read_config(RunConfig).train.iterations, progress(run)
    except (ValueError, StorageError) as error:
        return RunState(run.run_id, "unreadable", Progress(0, None, None), None, size, str(error))
    return RunState(run.run_id, _state(run), reached, iterations, size)


def _state(run: RunDirectory) -> State:
    try:
        if is_served(run) == "running":
            return "running"
    except ValueError:
        return "unknown"
    return "finished" if files.exists(run.path("summary.json")) else "stopped"


def progress(run: RunDirectory) -> Progress:
    """Reads the newest manifests only."""
    published, reward, held_out = 0, None, None
    for number in _numbers_downwards(run):
        if not published and run.read_manifest(number, "publish") is not None:
            published = number + 1
        if reward is None and (rollout := run.read_manifest(number, "rollout")) is not None:
            reward = rollout.data.get("reward_mean")
        if held_out is None and (evaluate := run.read_manifest(number, "evaluate")) is not None:
            held_out = evaluate.data.get("reward_mean")
        if published and reward is not None and held_out is not None:
            break
    return Progress(published, reward, held_out)


def check_idle(run: RunDirectory) -> Literal["no", "released"]:
    """See is_served. Raises BusyError, or ValueError with one sentence if it cannot be told."""
    if (served := is_served(run)) == "running":
        raise BusyError(f"{run.run_id}: is being worked on; stop it or wait for its end")
    return served


def is_served(run: RunDirectory) -> Literal["no", "released", "running"]:
    """What the data plane of the newest attempt says: it does not know the run or does not answer, it knows
    the run and has released it, or a flow works on it.

    Raises ValueError if the data plane does not say, because it wants another key."""
    url = run.newest_attempt().dataplane or run.read_config(RunConfig).dataplane.url or dataplane_url()
    if url is None:
        return "no"
    client = DataplaneClient(url, run.run_id, dataplane_key(), patience_s=0.0, timeout_s=STATUS_S)
    try:
        status = client.status()
        if _is_elsewhere(run, status["run_dir"]):
            return "no"
        return "released" if status["released"] else "running"
    except DataplaneError as error:
        if error.status in (401, 403):
            raise ValueError(
                f"{run.run_id}: its data plane at {url} does not say whether anybody works on it; "
                f"set SF_DATAPLANE_KEY ({error})"
            ) from None
        return "no"
    except (httpx.HTTPError, ValueError, KeyError):
        # gone, or something else has its port now
        return "no"


def _is_elsewhere(run: RunDirectory, run_dir: str) -> bool:
    """Whether the data plane serves another directory: this one is a copy, or only has the same name."""
    if run_dir == run.uri:
        return False
    if "://" in run_dir or "://" in run.uri:
        return True
    # a folder that is not here may be this one, as its host has it mounted
    return os.path.exists(run_dir) and not os.path.samefile(run_dir, run.uri)


def _is_run(run: RunDirectory) -> bool:
    return files.exists(run.path("config.json"))


def _numbers_downwards(run: RunDirectory) -> Iterator[int]:
    names = [folder.rsplit("/", 1)[-1] for folder in files.list_folders(run.path("manifests"))]
    return iter(sorted((int(name) for name in names if name.isdecimal()), reverse=True))
