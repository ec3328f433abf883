"""A sweep as it is stored: its settings, its runs, and why runs of it failed. Also how many of its runs
compute at once.

A sweep is the folder ROOT/sweeps/NAME; its runs are run directories in ROOT like any others.

The workers are divided into equal shares, so that the seconds of runs can be compared; workers that are left
over stay idle. A share is enough for a run if a plan can be made of it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from sf_core.config import RunConfig, WorkerConfig
from sf_core.config.validation import validate_config
from sf_core.config.yaml_file import find_differences
from sf_core.scheduling.plan import Worker, make_plan
from sf_core.settings import quote
from storage import files
from storage.json_files import parse_json
from storage.run_directory import RunDirectory

Share = tuple[str, ...]
"""Names of the workers of one run."""


def divide(workers: Sequence[Worker], configs: Sequence[RunConfig], most: int | None = None) -> list[Share]:
    """As many shares as possible, at most `most`, such that each configuration has a plan on each of them.
    One share has all workers, whether or not a plan can be made: the run tells what is missing."""
    kinds: dict[object, list[str]] = defaultdict(list)
    for worker in sorted(workers, key=lambda worker: worker.name):
        kinds[worker.tags, worker.device, worker.memory].append(worker.name)
    by_name = {worker.name: worker for worker in workers}
    for number in range(min(most or len(workers), len(workers)), 1, -1):
        shares = _deal(kinds.values(), number)
        if all(_has_plan([by_name[name] for name in share], configs) for share in shares):
            return shares
    return [tuple(sorted(by_name))]


def _deal(kinds: Collection[list[str]], number: int) -> list[Share]:
    shares: list[list[str]] = [[] for _ in range(number)]
    for names in kinds:
        each = len(names) // number
        for at, share in enumerate(shares):
            share += names[at * each : (at + 1) * each]
    return [tuple(sorted(share)) for share in shares]


def _has_plan(workers: list[Worker], configs: Sequence[RunConfig]) -> bool:
    try:
        for config in configs:
            make_plan(workers, config)
    except ValueError:
        return False
    return True


def copy_workers(
    workers: Mapping[str, WorkerConfig], num_gpus: int, most: int | None, *, may_move: bool
) -> dict[str, WorkerConfig]:
    """The workers of one run on a machine with so many GPUs, as many times as its GPUs suffice, at most
    `most` times. Without GPUs one run uses all cores: then once, unless `most` asks for more. `may_move`: the
    user has named no device."""
    num_taken = sum(worker.device != "cpu" for worker in workers.values())
    copies = most or 1
    if num_taken:
        copies = min(most or num_gpus, num_gpus // num_taken) if may_move else 1
    if copies <= 1:
        return dict(workers)
    return {
        f"{name}-{copy}": _move(worker, copy * num_taken)
        for copy in range(copies)
        for name, worker in workers.items()
    }


def _move(worker: WorkerConfig, by: int) -> WorkerConfig:
    device = str(worker.device)
    if device == "cpu":
        return worker
    return worker.model_copy(update={"device": f"cuda:{int(device.removeprefix('cuda:')) + by}"})


def describe_shares(shares: Sequence[Share]) -> str:
    if len(shares) == 1:
        return f"one run at a time, on {', '.join(shares[0])}"
    return f"{len(shares)} runs at a time, on {'; '.join(', '.join(share) for share in shares)}"


FOLDER = "sweeps"
"""Folder of all sweeps below `storage.root`."""

AS_IT_IS = "as configured"
"""Label of the one setting of a sweep that only varies seeds."""

OF_AN_ATTEMPT = ("cluster", "dataplane")
"""Sections that may differ when a sweep goes on: where its runs compute."""


SweepName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
"""A name as runs have it."""


class Setting(BaseModel):
    """One combination of values, which some runs share."""

    model_config = ConfigDict(frozen=True)

    values: Mapping[str, str]
    """Values as YAML, by the key of their setting."""
    fault: str | None = None
    """Why there are no runs of it."""

    @property
    def label(self) -> str:
        return ", ".join(f"{key}={text}" for key, text in self.values.items()) or AS_IT_IS


class SweepRun(BaseModel):
    run_id: str
    setting: str
    """Label of its setting."""
    seed: int
    config: dict[str, Any]
    """The whole configuration, as JSON."""


class Sweep(BaseModel):
    """What a sweep consists of, in the order in which it runs."""

    name: SweepName
    settings: list[Setting]
    runs: list[SweepRun]

    @property
    def root(self) -> str:
        """`storage.root` of its configuration."""
        return str(self.runs[0].config["storage"]["root"])

    def extend(self, added: Sweep) -> Sweep:
        """This sweep with the settings and seeds that another command gives it in addition. Raises ValueError
        if that command describes another sweep of the same name."""
        keys = _keys(self)
        others = _keys(added)
        if keys != others:
            raise ValueError(
                f"sweep {self.name} varies {_listed(keys)}, not {_listed(others)}: choose another name with "
                "--name NAME"
            )
        runs_by_id = {run.run_id: run for run in self.runs}
        for run in added.runs:
            if run.run_id in runs_by_id:
                self._check_equal(runs_by_id[run.run_id], run)
        settings = {setting.label: setting for setting in (*self.settings, *added.settings)}
        runs = [*self.runs, *(run for run in added.runs if run.run_id not in runs_by_id)]
        runs.sort(key=lambda run: run.seed)
        return Sweep(name=self.name, settings=list(settings.values()), runs=runs)

    def _check_equal(self, stored: SweepRun, added: SweepRun) -> None:
        for key, before, now in find_differences(_of_the_run(stored), _of_the_run(added)):
            raise ValueError(
                f"sweep {self.name} has the run {stored.run_id} with {key} {quote(before)}, not "
                f"{quote(now)}: choose another name with --name NAME, or use the former value"
            )


@dataclass(frozen=True, slots=True)
class SweepFolder:
    """Where a sweep is stored."""

    root: str
    """`storage.root` of its runs."""
    name: str

    @property
    def uri(self) -> str:
        return files.join(self.root, FOLDER, self.name)

    def path(self, name: str) -> str:
        return files.join(self.uri, name)

    def exists(self) -> bool:
        return files.exists(self.path("sweep.json"))

    def read(self) -> Sweep:
        """Raises ValueError with one sentence if there is no such sweep, or its file is broken."""
        uri = self.path("sweep.json")
        if (text := files.read_if_there(uri)) is None:
            raise ValueError(f"no sweep {self.name} in {self.root}{_others(self.root)}")
        return parse_json(Sweep, text, f"{uri}: cannot be read")

    def write(self, sweep: Sweep) -> None:
        files.write_atomic(self.path("sweep.json"), sweep.model_dump_json(indent=2).encode())

    def put(self, added: Sweep) -> Sweep:
        """Store a sweep, or what it adds to the one of its name; returns what is stored then."""
        sweep = self.read().extend(added) if self.exists() else added
        self.write(sweep)
        return sweep

    def read_failures(self) -> dict[str, str]:
        """Why runs failed at their last attempt, by their names."""
        uri = self.path("failures.json")
        text = files.read_if_there(uri)
        return {} if text is None else parse_json(dict[str, str], text, f"{uri}: cannot be read")

    def note_end(self, run_id: str, failure: str | None) -> None:
        """Keep why a run failed; None: it did not."""
        failures = self.read_failures()
        failures.pop(run_id, None)
        if failure is not None:
            failures[run_id] = failure
        files.write_atomic(self.path("failures.json"), json.dumps(failures, indent=2).encode())


@dataclass(frozen=True)
class OpenSweep:
    """A stored sweep, opened to run or to show it."""

    folder: SweepFolder
    sweep: Sweep

    @classmethod
    def read(cls, folder: SweepFolder) -> OpenSweep:
        return cls(folder, folder.read())

    def directory(self, run: SweepRun) -> RunDirectory:
        return RunDirectory(files.join(self.folder.root, run.run_id))

    def config(self, run: SweepRun) -> RunConfig:
        """Raises ConfigError if this version does not know a setting of it."""
        config = validate_config(dict(run.config), f"run {run.run_id}")
        return config.put(["storage", "root"], self.folder.root)

    @cached_property
    def configs(self) -> list[RunConfig]:
        """One configuration of each setting that has runs."""
        return list({run.setting: self.config(run) for run in self.sweep.runs}.values())


def list_sweeps(root: str) -> list[str]:
    """Names of the sweeps in a `storage.root`."""
    folders = files.list_folders(files.join(root, FOLDER))
    return [folder.rpartition("/")[2] for folder in folders]


def _others(root: str) -> str:
    names = list_sweeps(root)
    return f"; there is {', '.join(names)}" if names else "; `sf sweep CONFIG --seeds 3` makes one"


def _of_the_run(run: SweepRun) -> dict[str, Any]:
    return {name: value for name, value in run.config.items() if name not in OF_AN_ATTEMPT}


def _keys(sweep: Sweep) -> list[str]:
    return sorted({key for setting in sweep.settings for key in setting.values})


def _listed(keys: list[str]) -> str:
    return ", ".join(keys) or "seeds alone"
