"""What a run directory tells about a run: figures per iteration, and the rows of one session.

Reads manifests and the files they name, nothing else. The layout is sf_core/reports/tables.py's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import count
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sf_core.config.failures import sum_failures
from storage import files
from storage.manifests import Manifest
from storage.run_directory import STAGES, RunDirectory
from storage.schema import NOT_SAMPLED, SCHEMA, Trajectory
from storage.trajectories import read_trajectories, to_rows


@dataclass(frozen=True, slots=True)
class RolloutFigures:
    """Figures of the trajectories of one iteration."""

    sessions: int
    reward_mean: float
    """Mean over the sessions that have a reward."""
    tokens_sampled: int
    lag_mean: float
    """Mean over sampled tokens of the version being updated minus the version that sampled the token."""
    lag_max: int
    example: str
    """The id of one session."""
    failures: dict[str, int]
    """Numbers of failed sessions that count, by the reason."""


@dataclass(frozen=True, slots=True)
class IterationFigures:
    iteration: int
    committed: tuple[str, ...]
    """Committed stages."""
    rollout: RolloutFigures | None


SamplingKind = Literal["trains iteration", "evaluates version", "opened at version"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sessions of one iteration, of the evaluation of one policy version, or the sessions opened by
    agents for which this version was the newest to sample."""

    kind: SamplingKind
    number: int
    uris: list[str]
    """Parquet files with the columns of storage.schema.SCHEMA."""
    is_trained: bool = False
    """Whether a train step has used the sessions."""

    @property
    def label(self) -> str:
        return f"{self.kind} {self.number}"

    @property
    def fate(self) -> str:
        """What became of the tokens."""
        if self.kind == "trains iteration":
            return "trained" if self.is_trained else "not trained yet"
        return "never trained"


@dataclass(frozen=True, slots=True)
class SessionRows:
    session_id: str
    origin: str
    """Label of the `Sampling` that holds the session."""
    fate: str
    branches: list[Trajectory]


def open_run(uri: str) -> RunDirectory:
    """Open a run. Raises ValueError with one sentence, and similar names, if no run is there."""
    run = RunDirectory(uri)
    if files.exists(run.path("config.json")):
        return run
    parent = run.uri.removesuffix("/" + run.run_id)
    names = [folder.rsplit("/", 1)[-1] for folder in files.list_folders(parent)]
    raise ValueError(f"{uri}: no run here (config.json is missing){_did_you_mean(run.run_id, names)}")


def iteration_figures(run: RunDirectory) -> list[IterationFigures]:
    """Figures of all iterations with a committed stage, in order."""
    rows = (_figures(run, iteration) for iteration in itertools.count())
    return list(itertools.takewhile(lambda row: row.committed, rows))


def held_out_rewards(run: RunDirectory, versions: int) -> dict[int, float]:
    """Mean held-out reward by policy version, for evaluated versions below `versions`."""
    manifests = {version: run.read_manifest(version, "evaluate") for version in range(versions)}
    return {version: m.data["reward_mean"] for version, m in manifests.items() if m is not None}


def failures_of(manifest: Manifest) -> dict[str, int]:
    """Numbers of failed sessions of a rollout or an evaluation that count, by the reason; none in manifests
    of earlier versions."""
    return dict(manifest.data.get("failures", {}))


def held_out_failures(run: RunDirectory, versions: int) -> dict[str, int]:
    """Failures of all evaluations of versions below `versions`, summed by reason."""
    manifests = (run.read_manifest(version, "evaluate") for version in range(versions))
    return sum_failures(failures_of(manifest) for manifest in manifests if manifest is not None)


def find_session(run: RunDirectory, session_id: str) -> SessionRows:
    """Rows of one session. Raises ValueError with one sentence, and similar ids, if there is none."""
    seen: list[str] = []
    for sampling in samplings(run):
        for uri in sampling.uris:
            ids = read_trajectories(uri, ["session_id"])["session_id"].to_pylist()
            if session_id in ids:
                table = read_trajectories(uri, SCHEMA.names)
                rows = to_rows(table.filter(pc.equal(table["session_id"], session_id)))
                return SessionRows(session_id, sampling.label, sampling.fate, rows)
            seen.extend(ids)
    hint = _did_you_mean(session_id, sorted(set(seen))) if seen else "; none is committed yet"
    raise ValueError(f"{run.run_id}: no session {session_id!r}{hint}")


def samplings(run: RunDirectory) -> Iterator[Sampling]:
    """All committed sessions by iteration and evaluation, in order; then those opened by agents, whose files
    no manifest names."""
    for number in itertools.count():
        rollout, evaluate = (run.read_manifest(number, stage) for stage in ("rollout", "evaluate"))
        if evaluate is not None:
            yield Sampling("evaluates version", number, _parts(run, evaluate))
        if rollout is not None:
            is_trained = run.read_manifest(number, "train") is not None
            yield Sampling("trains iteration", number, _parts(run, rollout), is_trained)
        elif evaluate is None:
            break
    for number, uris in run.list_partitions("opened").items():
        yield Sampling("opened at version", number, uris)


def parts_of(run: RunDirectory, kind: SamplingKind) -> list[str]:
    """URIs of the trajectories of one kind, in order."""
    return [uri for sampling in samplings(run) if sampling.kind == kind for uri in sampling.uris]


def _figures(run: RunDirectory, iteration: int) -> IterationFigures:
    manifests = {stage: run.read_manifest(iteration, stage) for stage in STAGES}
    rollout = manifests["rollout"]
    return IterationFigures(
        iteration,
        tuple(stage for stage, manifest in manifests.items() if manifest is not None),
        None if rollout is None else _rollout_figures(run, rollout, iteration),
    )


def _rollout_figures(run: RunDirectory, manifest: Manifest, iteration: int) -> RolloutFigures:
    columns = ["session_id", "reward", "loss_mask", "policy_versions"]
    table = pa.concat_tables([read_trajectories(uri, columns) for uri in _parts(run, manifest)])
    ids, first = np.unique(table["session_id"].to_numpy(), return_index=True)
    rewards = table["reward"].to_numpy()[first]
    mask = pc.list_flatten(table["loss_mask"]).to_numpy()
    versions = pc.list_flatten(table["policy_versions"]).fill_null(NOT_SAMPLED).to_numpy()
    lags = iteration - versions[mask]
    return RolloutFigures(
        sessions=len(first),
        reward_mean=float(np.nanmean(rewards)),
        tokens_sampled=len(lags),
        lag_mean=float(lags.mean()) if len(lags) else 0.0,
        lag_max=int(lags.max(initial=0)),
        example=str(ids[0]),
        failures=failures_of(manifest),
    )


def _parts(run: RunDirectory, manifest: Manifest) -> list[str]:
    kinds = ("trajectories/", "evaluations/")
    return [run.path(ref.uri) for ref in manifest.outputs if ref.uri.startswith(kinds)]


def _did_you_mean(name: str, names: list[str]) -> str:
    near = get_close_matches(name, names)
    return f"; did you mean {', '.join(near)}?" if near else ""


Window = tuple[float, float]
"""Start and end, Unix seconds."""


@dataclass(frozen=True, slots=True)
class Iteration:
    number: int
    stages: Mapping[str, Manifest]
    """Committed manifests: of stages, and of `evaluate` if this version was evaluated."""

    @property
    def is_through(self) -> bool:
        return all(stage in self.stages for stage in STAGES)

    @property
    def sampled_tokens(self) -> int:
        """Tokens sampled in its window, evaluations included; not those of stages of an earlier attempt."""
        last = self.stages["publish"].attempt
        return sum(m.data.get("sampled_tokens", 0) for m in self.stages.values() if m.attempt == last)


def read_iterations(run: RunDirectory, first: int = 0) -> Iterator[Iteration]:
    """Iterations with a committed stage, in order; the last may not be through."""
    for number in count(first):
        found = {stage: run.read_manifest(number, stage) for stage in (*STAGES, "evaluate")}
        stages = {stage: manifest for stage, manifest in found.items() if manifest is not None}
        if not stages.keys() & set(STAGES):
            return
        yield Iteration(number, stages)


def iteration_windows(iterations: Iterable[Iteration]) -> dict[int, Window]:
    """Windows of the iterations that are through, by number: from the end of the one before to its own end;
    for an attempt's first iteration, from the start of the first stage that this attempt committed."""
    windows: dict[int, Window] = {}
    attempt, reached = None, 0.0
    for iteration in iterations:
        if iteration.is_through:
            last = iteration.stages["publish"]
            begun = next(s for s in map(iteration.stages.get, STAGES) if s and s.attempt == last.attempt)
            start = reached if last.attempt == attempt else begun.data["started_at"]
            attempt, reached = last.attempt, last.data["finished_at"]
            windows[iteration.number] = (start, reached)
    return windows
