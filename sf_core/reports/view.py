"""The reader of a run directory: everything that shows a run, the public `Run` included, stands on `RunView`.

Each figure is computed in one place: figures of an iteration in iterations.py, of its sessions in
sessions.py, and of the whole run here. tables.py, run_page.py and html/ only lay them out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache, cached_property
from itertools import count, islice
from typing import Any

import pyarrow.compute as pc

from sf_core.config import RunConfig
from sf_core.config.rollout_config import sum_failures
from sf_core.reports.iterations import Iteration, failures_of, runners_of
from sf_core.reports.sessions import RolloutFigures, SessionKind, SessionSet, read_rollout
from sf_core.scheduling.timeline import Span, read_spans
from sf_core.settings import did_you_mean
from sf_core.waits import Window
from storage import files
from storage.manifests import Manifest
from storage.run_directory import STAGES, RunDirectory
from storage.tables.metrics import read_metrics
from storage.tables.outcomes import outcomes_of
from storage.tables.schema import MULTIMODAL_SCHEMA, Trajectory
from storage.tables.trajectories import read_trajectories, to_rows
from storage.tensors.weights import has_weights

LISTED_RUNS = 8
"""Most runs that a message names."""

DeviceRow = dict[str, float]
"""Recorded figures of the devices in one iteration, by name."""


@dataclass(frozen=True, slots=True)
class NewestFigures:
    published: int
    """Number of published iterations, which is the newest policy version."""
    reward: float | None
    """Mean reward of the newest batch."""
    held_out: float | None
    """Mean reward of the newest evaluation."""


class RunView:
    """What is committed of a run. A view reads each manifest once and remembers it, and each series when it
    is first asked for; later commits of a live run are in the next view. The series are of the iterations
    `first` to `last`."""

    def __init__(self, run: RunDirectory, first: int = 0, last: int | None = None) -> None:
        self.run = run
        self.manifest = cache(run.read_manifest)
        self._first = first
        self._last = last

    @classmethod
    def open(cls, uri: str) -> RunView:
        """The view of the run at this address. Raises ValueError, one sentence with the runs in the same
        folder, if no run is there."""
        run = RunDirectory(uri)
        if run.exists():
            return cls(run)
        raise _no_run_error(uri, run)

    def between(self, first: int, last: int | None = None) -> RunView:
        """A view with the series of these iterations alone. Both views share the manifests that were read."""
        part = RunView(self.run, first, last)
        part.manifest = self.manifest
        return part

    @cached_property
    def config(self) -> RunConfig:
        return self.run.read_config(RunConfig)

    def read_committed(self, stage: str) -> list[Manifest]:
        """The manifests of a stage, from iteration 0 up to the first iteration without such a manifest."""
        manifests: list[Manifest] = []
        while (manifest := self.manifest(len(manifests), stage)) is not None:
            manifests.append(manifest)
        return manifests

    def iteration(self, number: int) -> Iteration:
        stages: dict[str, Manifest] = {}
        for stage in (*STAGES, "evaluate"):
            manifest = self.manifest(number, stage)
            if manifest is not None:
                stages[stage] = manifest
        published_before = self.manifest(number - 1, "publish") if number else None
        return Iteration(number, stages, published_before)

    @cached_property
    def iterations(self) -> list[Iteration]:
        """Iterations with a committed stage, in order; the last may be incomplete."""
        iterations = []
        for number in count(self._first):
            if self._last is not None and number > self._last:
                break
            iteration = self.iteration(number)
            if not iteration.stages.keys() & set(STAGES):
                break
            iterations.append(iteration)
        return iterations

    @property
    def complete_iterations(self) -> list[Iteration]:
        return [iteration for iteration in self.iterations if iteration.is_complete]

    @property
    def windows(self) -> dict[int, Window]:
        """Windows of the complete iterations, by number."""
        return {iteration.number: iteration.window for iteration in self.complete_iterations}

    @cached_property
    def held_out(self) -> dict[int, float]:
        """Mean held-out reward by policy version. Iteration k makes version k + 1."""
        return self.read_held_out(self._versions)

    @property
    def _versions(self) -> range:
        """Versions that the iterations begin with, and the version that the last one makes."""
        return range(self._first, self._first + len(self.iterations) + 1)

    def read_held_out(self, versions: Iterable[int]) -> dict[int, float]:
        """Mean held-out reward of each of these policy versions that was evaluated."""
        manifests = {version: self.manifest(version, "evaluate") for version in versions}
        return {number: manifest.data["reward_mean"] for number, manifest in manifests.items() if manifest}

    @cached_property
    def rollouts(self) -> dict[int, RolloutFigures]:
        """Figures of trajectories by iteration. Raises ValueError if a file is missing or broken."""
        figures = {}
        for iteration in self.iterations:
            session_set = self.find_session_set(iteration.number, "rollout")
            if session_set is not None:
                figures[iteration.number] = read_rollout(iteration, session_set)
        return figures

    @cached_property
    def devices(self) -> dict[int, DeviceRow]:
        """The recorded figures of devices by iteration."""
        return self.read_devices(iteration.number for iteration in self.iterations)

    def read_devices(self, numbers: Iterable[int]) -> dict[int, DeviceRow]:
        """The recorded figures of devices in these iterations, by iteration."""
        uris = {number: self.run.metrics_file("devices", number) for number in numbers}
        return {number: read_metrics(uri)[0] for number, uri in uris.items() if files.exists(uri)}

    def count_sampled(self, number: int) -> float | None:
        """Tokens that all devices sampled in an iteration's window, discarded tokens included; None if no
        figures are recorded."""
        row = self.devices.get(number)
        return None if row is None else row["tokens_rollout_only"] + row["tokens_lent"]

    @cached_property
    def spans(self) -> list[Span]:
        """What the devices did, by worker and time."""
        return read_spans(self.run)

    @property
    def tokens_sampled(self) -> int:
        """Tokens that engines sampled, discarded tokens included."""
        return sum(span.tokens for span in self.spans)

    @property
    def failures(self) -> dict[str, int]:
        """Numbers of failed training sessions that count, by the reason."""
        return sum_failures(map(failures_of, self._rollout_manifests))

    @property
    def held_out_failures(self) -> dict[str, int]:
        """Numbers of failed held-out sessions, by the reason."""
        manifests = (self.manifest(version, "evaluate") for version in self._versions)
        return sum_failures(map(failures_of, filter(None, manifests)))

    def count_reports(self, kind: str) -> int:
        """Reports of this kind on sessions that had ended (`late_reports`, `refused_reports`)."""
        return sum(manifest.data.get(kind, 0) for manifest in self._rollout_manifests)

    @property
    def _rollout_manifests(self) -> list[Manifest]:
        return [i.stages["rollout"] for i in self.iterations if "rollout" in i.stages]

    @property
    def runners(self) -> dict[str, dict[str, float]]:
        """CPU seconds of each worker of agents, and the number of sessions that have ended there."""
        total: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for manifest in self._rollout_manifests:
            for name, spent in runners_of(manifest.data).items():
                total[name].update(spent)
        return {
            name: {
                "sessions": spent["num_ended"],
                "cpu_s": round(spent["cpu_s"], 3),
                "cpu_s_per_session": round(spent["cpu_s"] / max(1, spent["num_ended"]), 5),
            }
            for name, spent in total.items()
        }

    def progress(self) -> NewestFigures:
        """Figures of the newest manifests. Reads no older ones."""
        names = [folder.rsplit("/", 1)[-1] for folder in files.list_folders(self.run.path("manifests"))]
        numbers = sorted((int(name) for name in names if name.isdecimal()), reverse=True)

        def newest_reward(stage: str) -> float | None:
            manifests = (self.manifest(number, stage) for number in numbers)
            newest = next(filter(None, manifests), None)
            return None if newest is None else newest.data.get("reward_mean")

        publish = next((number for number in numbers if self.manifest(number, "publish")), None)
        return NewestFigures(
            published=0 if publish is None else publish + 1,
            reward=newest_reward("rollout"),
            held_out=newest_reward("evaluate"),
        )

    def describe_adapter(self) -> str:
        """The adapter that the run trains, in words; empty if the run trains all weights."""
        start = self.manifest(None, "start")
        adapter = None if start is None else start.data.get("adapter")
        if adapter is None:
            return ""
        return (
            f"An adapter of rank {adapter['rank']} (alpha {adapter['alpha']:g}) is trained: "
            f"{adapter['parameters']:,} parameters, factors of {', '.join(adapter['targets'])}."
        )

    def list_stored_versions(self) -> list[int]:
        """Published versions whose weights are stored, in order; 0 is the start folder. A run removes others
        (`train.keep_weights`)."""
        if not self._has_start():
            return []
        published = self.progress().published
        stored = self.run.list_versions("weights")
        return [0, *(v for v in stored if v <= published and has_weights(self.run.weights_dir(v)))]

    def _has_start(self) -> bool:
        return files.exists(files.join(self.run.start_dir, "config.json"))

    def weights_of(self, version: int) -> str:
        """Folder of the weights of a published version. Raises ValueError, one sentence with the stored
        versions, if the weights are not stored."""
        folder = self.run.version_dir(version)
        if self._has_start() and (
            version == 0 or (version <= self.progress().published and has_weights(folder))
        ):
            return folder
        if not (stored := self.list_stored_versions()):
            raise ValueError(
                f"{self.run.run_id}: the run has no policy yet; continue the run with `sf resume "
                f"{self.run.uri}`"
            )
        raise ValueError(
            f"{self.run.run_id}: the weights of version {version} are not stored; stored versions: "
            f"{', '.join(map(str, stored))}"
        )

    def iter_session_sets(self) -> Iterator[SessionSet]:
        """All committed sessions by iteration and evaluation, in order; then the sessions opened by agents,
        whose files no manifest names."""
        for number in count():
            session_sets = [self.find_session_set(number, stage) for stage in ("evaluate", "rollout")]
            if not any(session_sets):
                break
            yield from filter(None, session_sets)
        for number, uris in self.run.list_partitions("opened").items():
            yield SessionSet("opened at version", number, uris)

    def parts(self, kind: SessionKind) -> list[str]:
        """URIs of the trajectories of one kind, in order."""
        session_sets = [found for found in self.iter_session_sets() if found.kind == kind]
        return [uri for session_set in session_sets for uri in session_set.uris]

    def find_session_set(self, number: int, stage: str) -> SessionSet | None:
        """The sessions of the `rollout` of an iteration, or of `evaluate` of a version; None if the stage is
        not committed."""
        if (manifest := self.manifest(number, stage)) is None:
            return None
        kinds = ("trajectories/", "evaluations/")
        uris = [self.run.path(ref.uri) for ref in manifest.outputs if ref.uri.startswith(kinds)]
        if stage == "evaluate":
            return SessionSet("evaluates version", number, uris)
        return SessionSet("trains iteration", number, uris, self.manifest(number, "train") is not None)

    def read_rejected(self, rollout: Manifest) -> list[tuple[str, str, dict[str, Any]]]:
        """Id of each group that a batch discarded, the reason, and its row of `outcomes`; the row is empty in
        runs that do not choose. Raises ValueError if a file is missing or broken."""
        outcomes = {str(row["number"]): row for row in outcomes_of(self.run, rollout)}
        rejected = []
        for number, reason in rollout.data.get("rejected", {}).items():
            group_id = f"{self.run.run_id}.g{number}"
            rejected.append((group_id, reason, outcomes.get(number, {})))
        return rejected

    def find_session(self, session_id: str) -> tuple[SessionSet, list[Trajectory]]:
        """The branches of one session, and the set that it is in. Raises ValueError with one sentence, and
        similar ids, if there is none."""
        other_ids: set[str] = set()
        for session_set in self.iter_session_sets():
            for uri in session_set.uris:
                ids = read_trajectories(uri, ["session_id"])["session_id"].to_pylist()
                if session_id in ids:
                    table = read_trajectories(uri, MULTIMODAL_SCHEMA.names)
                    return session_set, to_rows(table.filter(pc.equal(table["session_id"], session_id)))
                other_ids.update(ids)
        hint = did_you_mean(session_id, sorted(other_ids)) if other_ids else "; none is committed yet"
        raise ValueError(f"{self.run.run_id}: no session {session_id!r}{hint}")


def _no_run_error(uri: str, run: RunDirectory) -> ValueError:
    """The error that says why no run is there, and which runs are in the folder."""
    logs = files.join(run.local_dir, "logs")
    if files.exists(logs):
        return ValueError(f"{uri}: the run has not begun (config.json is missing); logs of its start: {logs}")
    if run.run_id.endswith((".yaml", ".yml")):
        listed = _list_runs(files.absolute("runs"), run.run_id)
        return ValueError(f"{uri} is a configuration, not a run; {listed}")
    listed = _list_runs(run.uri.removesuffix("/" + run.run_id), run.run_id)
    return ValueError(f"{uri}: no run here (config.json is missing); {listed}")


def _list_runs(folder: str, name: str) -> str:
    """The runs in a folder, in words. The names most similar to `name` come first."""
    candidates = [uri.rsplit("/", 1)[-1] for uri in files.list_folders(folder)]
    candidates.sort(key=lambda candidate: -SequenceMatcher(None, name, candidate).ratio())
    existing = (candidate for candidate in candidates if RunDirectory(files.join(folder, candidate)).exists())
    # each check is a request to a remote storage
    runs = [*islice(existing, LISTED_RUNS + 1)]
    if not runs:
        return f"{folder} has no runs"
    listed = ", ".join([*runs[:LISTED_RUNS], *("..." for _ in runs[LISTED_RUNS:])])
    return f"{folder} has the runs {listed}{did_you_mean(name, runs[:LISTED_RUNS])}"
