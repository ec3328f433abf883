"""Sessions: the files that hold them, their figures, and tables of them, of their groups and of their turns.

Owns the columns of these three tables, which `seamlessflow.open_run` gives.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sf_core.models.images.processor_config import read_image_processor
from sf_core.models.tokenizer import open_tokenizer
from sf_core.reports.iterations import Iteration, failures_of
from storage.run_directory import RunDirectory
from storage.tables.parquet import list_array
from storage.tables.schema import NOT_SAMPLED, SCHEMA, TURN, Trajectory, TurnSpan
from storage.tables.trajectories import first_rows, read_trajectories

Decode = Callable[[list[int]], str]
"""Text of token ids."""

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
        origin = "an evaluation" if self.kind == "evaluates version" else "an opened session"
        return f"sampled in {origin}, {self.fate}", "sampled, not counted here"

    def read(self, columns: list[str]) -> pa.Table:
        """Raises ValueError with one sentence if a file is missing or broken."""
        return pa.concat_tables([read_trajectories(uri, columns) for uri in self.uris])


@dataclass(frozen=True, slots=True)
class RolloutFigures:
    """Figures of the trajectories of one iteration."""

    sessions: int
    reward_mean: float
    tokens_sampled: int
    lag_mean: float
    """Mean over sampled tokens of the version being updated minus the version that sampled the token."""
    lag_max: int
    example: str
    """The id of one session."""
    failures: dict[str, int]
    """Numbers of failed sessions that count, by the reason."""


KINDS: dict[SessionKind, str] = {
    "trains iteration": "training",
    "evaluates version": "held_out",
    "opened at version": "opened",
}

TEXTS = ("policy", "messages", "tools", "output")
"""Columns of a session's first branch that are read if they are asked for."""

_TASK = ("task_id", "environment", "group_id")
_REPEATED = ("session_id", *_TASK, "status", "reward", "reward_parts", "started_at")
"""Columns that are the same in all branches of a session."""

_MERGED = {"interruptions": "sum", "min_version": "min", "max_version": "max", "finished_at": "max"}
"""How the value of a session follows from the values of its branches. In other columns it is the value of the
first branch."""

_COUNTS = ("branches", "answers", "tokens", "interruptions")

SESSIONS = pa.schema(
    [("iteration", pa.int32()), ("kind", pa.string())]
    + [SCHEMA.field(name) for name in _REPEATED]
    + [("seconds", pa.float64()), *((name, pa.int64()) for name in _COUNTS)]
    + [SCHEMA.field(name) for name in ("min_version", "max_version", *TEXTS)]
)

GROUPS = pa.schema(
    [("iteration", pa.int32()), ("group_id", pa.string()), ("task_id", pa.string())]
    + [("environment", pa.string()), ("verdict", pa.string()), ("sessions", pa.int64())]
    + [(f"reward_{name}", pa.float64()) for name in ("mean", "min", "max")]
    + [("tokens", pa.int64())]
)

TURNS = pa.schema(
    [("branch_id", pa.string()), ("turn", pa.int32()), ("repeated", pa.bool_()), ("text", pa.string()), *TURN]
    + [("tokens", pa.list_(pa.string()))]
    + [SCHEMA.field(name) for name in ("token_ids", "logprobs", "policy_versions", "loss_mask")]
)


def all_sessions(session_sets: Iterable[SessionSet], columns: Sequence[str]) -> pa.Table:
    tables = [sessions_of(session_set, columns) for session_set in session_sets]
    return pa.concat_tables([_schema(columns).empty_table(), *tables])


def sessions_of(session_set: SessionSet, columns: Sequence[str]) -> pa.Table:
    """One row per session of a set, with these columns of SESSIONS."""
    texts = [name for name in TEXTS if name in columns]
    stored = [*_REPEATED, *texts, "min_version", "max_version", "finished_at", "interruptions"]
    branches = session_set.read([*stored, "shared_prefix", "turns", "policy_versions"])
    answers, tokens = _count_new(branches)
    merged = merge_branches(branches, stored, {"answers": answers, "tokens": tokens})
    duration = pc.subtract(merged["finished_at"], merged["started_at"])
    seconds = pc.divide(duration.cast(pa.int64()).cast(pa.float64()), 1e6)
    values: dict[str, Any] = {name: merged[name] for name in merged.column_names}
    values["iteration"] = pa.array([session_set.number] * len(merged), pa.int32())
    values["kind"] = pa.array([KINDS[session_set.kind]] * len(merged))
    # earlier versions have stored the clock as it was, which may have been set back meanwhile
    values["seconds"] = pc.max_element_wise(seconds, 0.0, skip_nulls=False)
    return pa.table([values[name] for name in columns], schema=_schema(columns))


def merge_branches(
    branches: pa.Table, columns: Sequence[str], counts: Mapping[str, npt.NDArray[np.int64]]
) -> pa.Table:
    """One row per session, in the order of their first branches, with these columns, the number of branches,
    and the sums of `counts`, each of which has a number per branch."""
    counts = {"branches": np.ones(len(branches), np.int64), **counts}
    functions = {name: _MERGED.get(name, "first") for name in columns} | dict.fromkeys(counts, "sum")
    per_branch = {name: branches[name] for name in columns if functions[name] != "first"} | counts
    # the codes count the sessions in the order of their first branches
    codes = branches["session_id"].combine_chunks().dictionary_encode().indices
    grouped = pa.table({"code": codes, **per_branch}).group_by("code")
    merged = grouped.aggregate([(name, functions[name]) for name in per_branch]).sort_by("code")
    first = branches.take(first_rows(branches["session_id"]))
    return pa.table(
        {
            name: merged[f"{name}_{how}"] if name in per_branch else first[name]
            for name, how in functions.items()
        }
    )


def groups_of(session_set: SessionSet) -> pa.Table:
    """One row per group of a batch, of its sessions."""
    sessions = sessions_of(session_set, ["iteration", *_TASK, "reward", "tokens"])
    grouped = sessions.filter(pc.is_valid(sessions["group_id"])).group_by(
        ["iteration", *_TASK], use_threads=False
    )
    sums = grouped.aggregate(
        [*(("reward", how) for how in ("mean", "min", "max", "count")), ("tokens", "sum")]
    )
    named = sums.rename_columns({"reward_count": "sessions", "tokens_sum": "tokens"})
    judged = named.append_column("verdict", pa.array(["sealed"] * len(named)))
    return judged.select(GROUPS.names).cast(GROUPS)


def turns_of(branches: Sequence[Trajectory], decode: Decode) -> pa.Table:
    """One row per turn of each branch, in order."""
    found: list[tuple[Trajectory, int, TurnSpan]] = []
    for branch in branches:
        found += [(branch, number, turn) for number, turn in enumerate(branch.turns)]

    def cut(name: str) -> list[npt.NDArray[Any]]:
        return [getattr(branch, name)[turn.start : turn.end] for branch, _, turn in found]

    ids = cut("token_ids")
    versions = cut("policy_versions")
    not_sampled = [row == NOT_SAMPLED for row in versions]
    values: dict[str, Any] = {
        "branch_id": [branch.branch_id for branch, _, _ in found],
        "turn": [number for _, number, _ in found],
        "repeated": [turn.end <= branch.shared_prefix for branch, _, turn in found],
        "text": [decode(row.tolist()) for row in ids],
        "tokens": [[decode([token_id]) for token_id in row.tolist()] for row in ids],
        "token_ids": list_array(ids, np.int32),
        "logprobs": list_array(cut("logprobs"), np.float32, not_sampled),
        "policy_versions": list_array(versions, np.int32, not_sampled),
        "loss_mask": list_array(cut("loss_mask"), np.bool_),
    }
    values |= {name: [getattr(turn, name) for _, _, turn in found] for name in TurnSpan._fields}
    return pa.Table.from_pydict(values, schema=TURNS)


def _count_new(rows: pa.Table) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Answers and tokens that were sampled in each branch, without those that it shares with its parent."""
    shared = rows["shared_prefix"].to_numpy()
    turns = rows["turns"].combine_chunks()
    row_of_turn = pc.list_parent_indices(turns).to_numpy()
    flat_turns = turns.flatten()
    is_answer = pc.is_valid(pc.struct_field(flat_turns, "engine")).to_numpy(zero_copy_only=False)
    is_own_turn = pc.struct_field(flat_turns, "end").to_numpy() > shared[row_of_turn]
    versions = rows["policy_versions"].combine_chunks()
    row_of_token = pc.list_parent_indices(versions).to_numpy()
    lengths = versions.value_lengths().to_numpy()
    row_starts = np.cumsum(lengths) - lengths
    positions = np.arange(len(row_of_token)) - row_starts[row_of_token]
    is_sampled = pc.is_valid(versions.flatten()).to_numpy(zero_copy_only=False)
    is_own_token = positions >= shared[row_of_token]
    answers = np.bincount(row_of_turn[is_answer & is_own_turn], minlength=len(rows))
    tokens = np.bincount(row_of_token[is_sampled & is_own_token], minlength=len(rows))
    return answers, tokens


def _schema(columns: Sequence[str]) -> pa.Schema:
    return pa.schema([SESSIONS.field(name) for name in columns])


def read_rollout(iteration: Iteration, session_set: SessionSet) -> RolloutFigures:
    """Figures of the trajectories of an iteration. Raises ValueError if a file is missing or broken."""
    table = session_set.read(["session_id", "loss_mask", "policy_versions"])
    ids = np.unique(table["session_id"].to_numpy())
    mask = pc.list_flatten(table["loss_mask"]).to_numpy()
    versions = pc.list_flatten(table["policy_versions"]).fill_null(NOT_SAMPLED).to_numpy()
    lags = iteration.number - versions[mask]
    return RolloutFigures(
        sessions=len(ids),
        reward_mean=iteration.reward,
        tokens_sampled=len(lags),
        lag_mean=float(lags.mean()) if len(lags) else 0.0,
        lag_max=int(lags.max(initial=0)),
        example=str(ids[0]),
        failures=failures_of(iteration.stages["rollout"]),
    )


def open_decoder(run: RunDirectory, has_images: bool) -> Decode:
    """Decoder of the run's tokenizer; shows ids if the run has none. `has_images`: some tokens are of images,
    each of which becomes `[picture]`."""
    tokenizer = open_tokenizer(run)
    if tokenizer is None:
        return lambda ids: " ".join(map(str, ids))
    image_processor = read_image_processor(run.start_dir) if has_images else None
    if image_processor is None:
        return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))
    placeholders = f"(?:{re.escape(str(tokenizer.id_to_token(image_processor.token_id)))})+"
    return lambda ids: re.sub(placeholders, "[picture]", tokenizer.decode(ids, skip_special_tokens=False))
