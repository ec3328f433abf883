"""The one reading of a run directory: its iterations and sessions, as manifests tell them.

Reads manifests and the files they name, nothing else. Figures are sf_core/reports/series.py's, the layout is
sf_core/reports/tables.py's.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from itertools import count, islice, takewhile
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from sf_core.models.tokenizer import open_tokenizer
from sf_core.pictures.sight import read_sight
from sf_core.recipes.gates import KINDS, Kind
from sf_core.scheduling.leases import lease_of
from sf_core.settings import did_you_mean
from sf_core.stopwatch import Window, in_order, rate
from storage import files
from storage.manifests import Manifest
from storage.run_directory import STAGES, RunDirectory
from storage.tables.outcomes import outcomes_of
from storage.tables.schema import SEEING_SCHEMA, Trajectory
from storage.tables.trajectories import read_trajectories, to_rows
from storage.tensors.weights import has_weights

LISTED_RUNS = 8
"""Most runs that a message names."""

Decode = Callable[[list[int]], str]
"""Text of token ids."""


@dataclass(frozen=True, slots=True)
class NewestFigures:
    published: int
    """Number of published iterations, which is the newest policy version."""
    reward: float | None
    """Mean reward of the newest batch."""
    held_out: float | None
    """Mean reward of the newest evaluation."""


@dataclass(frozen=True, slots=True)
class Iteration:
    number: int
    stages: Mapping[str, Manifest]
    """Committed manifests: of stages, and of `evaluate` if this version was evaluated."""
    published_before: Manifest | None
    """The manifest that ended the iteration before."""

    @property
    def is_through(self) -> bool:
        return all(stage in self.stages for stage in STAGES)

    @property
    def reward(self) -> float:
        """Mean reward of the sampled sessions."""
        reward: float = self.stages["rollout"].data["reward_mean"]
        return reward

    @property
    def lag(self) -> float | None:
        """Mean lag of the tokens that the filter kept; None if it kept none."""
        lags = self.stages["filter"].data.get("lags", [])
        return sum(lag * count for lag, count in enumerate(lags)) / sum(lags) if any(lags) else None

    @property
    def window(self) -> Window:
        """From the end of the iteration before to its own end, once it is through; for an attempt's first
        iteration, from the start of the first stage that this attempt committed."""
        last = self.stages["publish"]
        before = self.published_before
        if before is not None and before.attempt == last.attempt:
            return in_order(before.data["finished_at"], last.data["finished_at"])
        begun = next(m for stage in STAGES if (m := self.stages[stage]).attempt == last.attempt)
        return in_order(begun.data["started_at"], last.data["finished_at"])

    @property
    def kinds(self) -> dict[Kind, int] | None:
        return kinds_in(self.stages.get("rollout"))

    @property
    def seconds(self) -> float:
        """Length of its window."""
        start, end = self.window
        return end - start

    @property
    def tokens_per_second(self) -> float | None:
        """None: the clocks of its stages disagree, so that its length is not known."""
        return rate(self.sampled_tokens, self.seconds)

    @property
    def sampled_tokens(self) -> int:
        """Tokens sampled in its window, evaluations included; not those of stages of an earlier attempt."""
        last = self.stages["publish"].attempt
        return sum(m.data.get("sampled_tokens", 0) for m in self.stages.values() if m.attempt == last)


SessionKind = Literal["trains iteration", "evaluates version", "opened at version"]


@dataclass(frozen=True, slots=True)
class SessionSet:
    """The sessions of one iteration, of the evaluation of one policy version, or the sessions opened by
    agents for which this version was the newest to sample."""

    kind: SessionKind
    number: int
    uris: list[str]
    """Parquet files with the columns of storage/tables/schema.py."""
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
        return "not used for training"

    @property
    def marks(self) -> tuple[str, str]:
        """Legend of the sampled tokens that count in their branch, and of those that do not."""
        if self.kind == "trains iteration":
            return f"sampled, {self.fate}", "sampled, not trained here"
        place = "an evaluation" if self.kind == "evaluates version" else "an opened session"
        return f"sampled in {place}, {self.fate}", "sampled, not counted here"

    def read(self, columns: list[str]) -> pa.Table:
        """Raises ValueError with one sentence if a file is missing or broken."""
        return pa.concat_tables([read_trajectories(uri, columns) for uri in self.uris])


class RunView:
    """What the manifests of a run tell. A view looks for each manifest once and keeps what it found; what a
    live run commits afterwards is in the next view."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self.manifest = cache(run.read_manifest)

    def read_committed(self, stage: str) -> list[Manifest]:
        """The manifests of a stage from iteration 0 to the first one in which it is not committed."""
        found: list[Manifest] = []
        while (manifest := self.manifest(len(found), stage)) is not None:
            found.append(manifest)
        return found

    def iteration(self, number: int) -> Iteration:
        stages: dict[str, Manifest] = {}
        for stage in (*STAGES, "evaluate"):
            manifest = self.manifest(number, stage)
            if manifest is not None:
                stages[stage] = manifest
        published_before = self.manifest(number - 1, "publish") if number else None
        return Iteration(number, stages, published_before)

    def iterations(self, first: int = 0) -> Iterator[Iteration]:
        """Iterations with a committed stage, in order; the last may not be through."""
        return takewhile(lambda found: found.stages.keys() & set(STAGES), map(self.iteration, count(first)))

    def read_held_out(self, versions: Iterable[int]) -> dict[int, float]:
        """Mean held-out reward of each of these policy versions that was evaluated."""
        found = ((version, self.manifest(version, "evaluate")) for version in versions)
        return {version: manifest.data["reward_mean"] for version, manifest in found if manifest is not None}

    def progress(self) -> NewestFigures:
        """How far the run is, from its newest manifests only."""
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
        """What the run trains in place of all weights, in words; empty if it trains these."""
        start = self.manifest(None, "start")
        adapter = None if start is None else start.data.get("adapter")
        if adapter is None:
            return ""
        return (
            f"An adapter of rank {adapter['rank']} (alpha {adapter['alpha']:g}) is trained: "
            f"{adapter['parameters']:,} parameters, factors of {', '.join(adapter['targets'])}."
        )

    def list_kept_versions(self) -> list[int]:
        """Published versions whose weights are there, in order; 0 is the start folder. A run that goes on
        removes others (`train.keep_weights`)."""
        if not self._has_start():
            return []
        published = self.progress().published
        stored = self.run.list_versions("weights")
        return [0, *(v for v in stored if v <= published and has_weights(self.run.weights_dir(v)))]

    def _has_start(self) -> bool:
        return files.exists(files.join(self.run.start_dir, "config.json"))

    def weights_of(self, version: int) -> str:
        """Folder of the weights of a published version. Raises ValueError, one sentence with those that are
        kept, if they are not there."""
        folder = self.run.version_dir(version)
        if self._has_start() and (
            version == 0 or (version <= self.progress().published and has_weights(folder))
        ):
            return folder
        if not (kept := self.list_kept_versions()):
            raise ValueError(
                f"{self.run.run_id}: the run has no policy yet; continue the run with `sf resume "
                f"{self.run.uri}`"
            )
        raise ValueError(
            f"{self.run.run_id}: the weights of version {version} are not stored; stored versions: "
            f"{', '.join(map(str, kept))}"
        )

    def iter_session_sets(self) -> Iterator[SessionSet]:
        """All committed sessions by iteration and evaluation, in order; then those opened by agents, whose
        files no manifest names."""
        for number in count():
            found = [self.find_session_set(number, stage) for stage in ("evaluate", "rollout")]
            if not any(found):
                break
            yield from filter(None, found)
        for number, uris in self.run.list_partitions("opened").items():
            yield SessionSet("opened at version", number, uris)

    def parts(self, kind: SessionKind) -> list[str]:
        """URIs of the trajectories of one kind, in order."""
        return [uri for found in self.iter_session_sets() if found.kind == kind for uri in found.uris]

    def find_session_set(self, number: int, stage: str) -> SessionSet | None:
        """The sessions of the `rollout` of an iteration, or of `evaluate` of a version; None if that is not
        committed."""
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
        seen: list[str] = []
        for sampling in self.iter_session_sets():
            for uri in sampling.uris:
                ids = read_trajectories(uri, ["session_id"])["session_id"].to_pylist()
                if session_id in ids:
                    table = read_trajectories(uri, SEEING_SCHEMA.names)
                    return sampling, to_rows(table.filter(pc.equal(table["session_id"], session_id)))
                seen.extend(ids)
        hint = did_you_mean(session_id, sorted(set(seen))) if seen else "; none is committed yet"
        raise ValueError(f"{self.run.run_id}: no session {session_id!r}{hint}")


def open_run(uri: str) -> RunView:
    """Open a run. Raises ValueError, one sentence with the runs in the same folder, if no run is there."""
    run = RunDirectory(uri)
    if run.exists():
        return RunView(run)
    if files.exists(logs := files.join(run.local_dir, "logs")):
        raise ValueError(f"{uri}: the run has not begun (config.json is missing); logs of its start: {logs}")
    if run.run_id.endswith((".yaml", ".yml")):
        listed = _list_runs(files.absolute("runs"), run.run_id)
        raise ValueError(f"{uri} is a configuration, not a run; {listed}")
    listed = _list_runs(run.uri.removesuffix("/" + run.run_id), run.run_id)
    raise ValueError(f"{uri}: no run here (config.json is missing); {listed}")


def _list_runs(folder: str, name: str) -> str:
    """The runs in a folder, in words, those first whose names are most like this one."""
    names = [found.rsplit("/", 1)[-1] for found in files.list_folders(folder)]
    names.sort(key=lambda found: -SequenceMatcher(None, name, found).ratio())
    are_runs = (found for found in names if RunDirectory(files.join(folder, found)).exists())
    # each costs a request to a remote storage
    runs = [*islice(are_runs, LISTED_RUNS + 1)]
    if not runs:
        return f"{folder} has no runs"
    listed = ", ".join([*runs[:LISTED_RUNS], *("..." for _ in runs[LISTED_RUNS:])])
    return f"{folder} has the runs {listed}{did_you_mean(name, runs[:LISTED_RUNS])}"


def open_decoder(run: RunDirectory, sees: bool) -> Decode:
    """Decoder of the run's tokenizer; shows ids if it has none. `sees`: some tokens are of pictures, each
    of which becomes `[picture]`."""
    tokenizer = open_tokenizer(run)
    if tokenizer is None:
        return lambda ids: " ".join(map(str, ids))
    sight = read_sight(run.start_dir) if sees else None
    if sight is None:
        return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))
    placeholders = f"(?:{re.escape(str(tokenizer.id_to_token(sight.token_id)))})+"
    return lambda ids: re.sub(placeholders, "[picture]", tokenizer.decode(ids, skip_special_tokens=False))


def stage_time(manifest: Manifest) -> Window:
    """When a stage began and ended, in Unix seconds."""
    return in_order(manifest.data["started_at"], manifest.data["finished_at"])


def failures_of(manifest: Manifest) -> dict[str, int]:
    """Numbers of failed sessions of a rollout or an evaluation that count, by the reason, and of those that
    were not judged."""
    unjudged = manifest.data.get("unjudged")
    return manifest.data["failures"] | ({"not_judged": unjudged} if unjudged else {})


def runners_of(rollout: Mapping[str, Any]) -> dict[str, Counter[str]]:
    """What the runner of each worker spent until a batch was sealed (`Spent`), by the facts of the batch.
    Empty for runs of before it was counted."""
    spent: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for holder, told in rollout.get("runners", {}).items():
        spent[lease_of(holder)[0]].update(told)
    return spent


def kinds_in(manifest: Manifest | None) -> dict[Kind, int] | None:
    """Groups that left with a batch, by whether all, some or none of their sessions were right. None if the
    run did not choose."""
    told = {} if manifest is None else manifest.data
    return {kind: told[kind] for kind in KINDS} if told.keys() >= set(KINDS) else None


def kinds_text(kinds: Mapping[Kind, int] | None) -> str:
    return "" if kinds is None else "/".join(str(kinds[kind]) for kind in KINDS)
