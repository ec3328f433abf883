"""Invariants of a run's manifests and Parquet files, whatever happened to it."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sf_core.config import RunConfig
from sf_core.dataplane.journal.journal_file import frames, payload
from sf_core.dataplane.runs.events import Finished, read_event
from sf_core.dataplane.sessions.finished import FinishedSession
from sf_core.scheduling.timeline import read_spans
from storage import files
from storage.run_directory import STAGES, RunDirectory
from storage.tables import parquet
from storage.tables.metrics import read_metrics
from storage.tables.outcomes import SCHEMA
from storage.tables.schema import NOT_SAMPLED, Trajectory
from storage.tables.trajectories import read_trajectories
from storage.tensors.weights import FILE_NAME

Stages = dict[tuple[int, str], dict[str, Any]]


def manifests(config: RunConfig) -> Stages:
    """Manifests of all committed stages of a run."""
    found = {}
    for folder in files.list_folders(RunDirectory(config.run_dir).path("manifests")):
        for uri in files.list_files(folder):
            stage = uri.rsplit("/", 1)[-1].removesuffix(".json")
            found[int(folder.rsplit("/", 1)[-1]), stage] = json.loads(files.read_bytes(uri))
    return found


def check_result(config: RunConfig, *, steady_clock: bool = True) -> None:
    """Check of a run that has ended: everything is there, once, and as it was written; and, if the wall clock
    never jumped, no device worked under a tag that did not hold it."""
    directory = RunDirectory(config.run_dir)
    committed = manifests(config)
    wanted = {(k, stage) for k in range(config.train.iterations) for stage in STAGES}
    assert wanted <= committed.keys()
    for iteration, stage in committed:
        manifest = directory.read_manifest(iteration, stage)
        assert manifest is not None
        directory.verify(manifest)
    consumed = _consumed(config, committed)
    assert len(consumed) == len(set(consumed)) == config.train.iterations * config.rollout.groups_per_batch
    sessions: list[str] = []
    for k in range(config.train.iterations):
        rows = trajectories(config, k)
        sessions_per_group = rows.group_by("group_id").aggregate([("session_id", "count_distinct")])
        assert sessions_per_group.num_rows == config.rollout.groups_per_batch
        if not config.rollout.chooses:  # else check_outcomes says how many
            sizes = set(sessions_per_group["session_id_count_distinct"].to_pylist())
            assert sizes == {config.rollout.group_size}
        sessions += set(rows["session_id"].to_pylist())
        check_tokens(rows)
        # consumed lag never exceeds the bound (invariant 8)
        assert k - min(rows["min_version"].to_pylist()) <= config.lag_bound
        assert committed[k, "publish"]["data"]["version"] == committed[k, "train"]["data"]["version"] == k + 1
        assert committed[k, "filter"]["data"]["rows"] == rows.num_rows
        rewards = [committed[k, stage]["data"]["reward_mean"] for stage in ("rollout", "filter", "train")]
        assert max(rewards) - min(rewards) < 1e-9
    assert len(sessions) == len(set(sessions))
    if config.rollout.chooses:
        check_outcomes(config)
    if steady_clock:
        check_devices(config)
    summary = json.loads(files.read_bytes(directory.path("summary.json")))
    assert summary["iterations"] == config.train.iterations
    assert summary["tokens_sampled"] == sum(span.tokens for span in read_spans(directory))


def weights(config: RunConfig) -> list[str]:
    """Checksums of the weights that each iteration of a finished run made."""
    committed = manifests(config)
    written = [committed[k, "train"]["outputs"] for k in range(config.train.iterations)]
    return [next(ref["sha256"] for ref in refs if ref["uri"].endswith(FILE_NAME)) for refs in written]


def check_devices(config: RunConfig) -> None:
    """Invariant 6 as recorded: a device works under a tag only while the tag holds it, and a tag holds it
    only after the one before has released it."""
    lines = defaultdict(list)
    for span in read_spans(RunDirectory(config.run_dir)):
        lines[span.worker].append(span)
    for spans in lines.values():
        held = [span for span in spans if span.kind == "held"]
        assert all(before.end <= after.start for before, after in pairwise(held))
        for done in spans:
            if done.kind in ("busy", "moving"):
                within = [h for h in held if h.start <= done.start and done.end <= h.end]
                assert [(h.tag, h.lease) for h in within] == [(done.tag, done.lease)], done


def check_nothing_lost(config: RunConfig) -> None:
    """Invariant 7 as stored, for a run without faults: all tokens that engines sampled are in the Parquet,
    once, even if the device was taken in the middle of a request."""
    sampled = sum(span.tokens for span in read_spans(RunDirectory(config.run_dir)))
    tables = [trajectories(config, k) for k in range(config.train.iterations)]
    tables += [_table(config, k, "evaluate") for k, stage in manifests(config) if stage == "evaluate"]
    assert sampled == sum(pc.sum(pc.list_flatten(rows["loss_mask"])).as_py() for rows in tables)


def check_tokens(rows: pa.Table) -> None:
    """Invariants 2 and 3 as stored: sampled tokens, and only they, are trained, each with its log-prob
    and version, in one branch; versions never decrease along a branch."""
    columns = ["loss_mask", "logprobs", "policy_versions", "turns", "shared_prefix", "parent_branch_id"]
    columns += ["token_ids", "session_id", "branch_id", "min_version", "max_version"]
    found = rows.select(columns).to_pylist()
    by_branch = {_branch(row): row for row in found}
    assert len(by_branch) == len(found)
    for row in found:
        sampled = [version is not None for version in row["policy_versions"]]
        assert sampled == [logprob is not None for logprob in row["logprobs"]]
        start = row["shared_prefix"]
        assert row["loss_mask"][start:] == sampled[start:]
        assert not any(row["loss_mask"][:start])
        spans = [turn for turn in row["turns"] if turn["role"] == "assistant"]
        assert sum(turn["end"] - turn["start"] for turn in spans) == sum(sampled)
        versions = [version for version in row["policy_versions"] if version is not None]
        assert versions == sorted(versions)
        assert (versions[0], versions[-1]) == (row["min_version"], row["max_version"])
        assert any(row["loss_mask"]), "a branch that trains nothing"
        if row["parent_branch_id"] is None:
            assert start == 0
            continue
        # the tokens that both have are those of the parent, which trains what was sampled of them, or its own
        parent = by_branch[row["session_id"], row["parent_branch_id"]]
        for column in ("token_ids", "logprobs", "policy_versions"):
            assert row[column][:start] == parent[column][:start]


@dataclass(frozen=True)
class Snapshot:
    """What a run has done at one moment, which it may neither lose nor repeat (invariant 9)."""

    manifests: Stages
    finished: list[FinishedSession]
    """Training sessions whose results are in the data plane's journal."""

    @classmethod
    def take(cls, config: RunConfig, journal: Path) -> Snapshot:
        committed = manifests(config)
        with open(journal, "rb") as file:
            events = [read_event(payload(data)) for data in frames(file)]
        results = [event.result for event in events if isinstance(event, Finished)]
        return cls(
            committed,
            [session for session in results if session.claim and session.claim.slot.split == "train"],
        )

    def lost(self, config: RunConfig) -> list[str]:
        """Stages and branches that are missing or changed at the end of the run."""
        after = manifests(config)
        lost = [
            f"{stage} of iteration {k}"
            for (k, stage), was in self.manifests.items()
            if after.get((k, stage)) != was
        ]
        stored = {
            _branch(row): row
            for k in range(config.train.iterations)
            for row in trajectories(config, k).to_pylist()
        }
        # others were rejected, or came too late for the last batch
        consumed = set(_consumed(config, after))
        most = _num_sessions(config)
        seen: Counter[int] = Counter()
        for session in self.finished:
            assert session.claim is not None
            group = session.claim.slot.group
            seen[group] += 1
            # the rest ended while the session was recorded with which its group was complete
            if group in consumed and seen[group] <= most.get(group, seen[group]):
                lost += [
                    f"branch {row.branch_id} of session {row.session_id}"
                    for row in session.trajectories
                    if not _is_same(row, stored.get((row.session_id, row.branch_id)))
                ]
        return lost


def _consumed(config: RunConfig, committed: Stages) -> list[int]:
    return [
        group for k in range(config.train.iterations) for group in committed[k, "rollout"]["data"]["groups"]
    ]


def trajectories(config: RunConfig, iteration: int) -> pa.Table:
    """The sealed rows of a batch."""
    return _table(config, iteration, "rollout")


def _table(config: RunConfig, iteration: int, stage: str) -> pa.Table:
    directory = RunDirectory(config.run_dir)
    manifest = directory.read_manifest(iteration, stage)
    assert manifest is not None
    uris = [
        directory.path(ref.uri) for kind in ("trajectories", "evaluations") for ref in manifest.files(kind)
    ]
    return pa.concat_tables(map(read_trajectories, uris))


def _branch(row: dict[str, Any]) -> tuple[str, str]:
    return row["session_id"], row["branch_id"]


def _is_same(recorded: Trajectory, stored: dict[str, Any] | None) -> bool:
    """Whether ids, mask, log-probs and versions are equal bit for bit (invariant 1)."""
    if stored is None:
        return False
    logprobs = np.array([np.nan if value is None else value for value in stored["logprobs"]], np.float32)
    versions = [NOT_SAMPLED if value is None else value for value in stored["policy_versions"]]
    return (
        recorded.token_ids.tolist() == stored["token_ids"]
        and recorded.loss_mask.tolist() == stored["loss_mask"]
        and recorded.policy_versions.tolist() == versions
        and np.array_equal(recorded.logprobs, logprobs, equal_nan=True)
        and recorded.reward == stored["reward"]
    )


def outcomes(config: RunConfig, iteration: int) -> list[dict[str, Any]]:
    """The rows of groups that had left when a batch was sealed."""
    directory = RunDirectory(config.run_dir)
    manifest = directory.read_manifest(iteration, "rollout")
    assert manifest is not None
    [ref] = manifest.files("outcomes")
    return list(parquet.read_table(directory.path(ref.uri), SCHEMA.names, SCHEMA).to_pylist())


def check_outcomes(config: RunConfig) -> None:
    """Check of a run that chooses: every group that has left is told once, as the manifest has it, and what
    trains is what is told, no group more or less."""
    committed = manifests(config)
    rules = config.rollout
    told: list[int] = []
    for k in range(config.train.iterations):
        rows = outcomes(config, k)
        data = committed[k, "rollout"]["data"]
        sealed = {row["group_id"]: row for row in rows if row["verdict"] == "sealed"}
        assert [row["number"] for row in sealed.values()] == data["groups"]
        dropped = {str(row["number"]): row["verdict"] for row in rows if row["verdict"] != "sealed"}
        assert dropped == data["rejected"]
        told += [row["number"] for row in rows]
        [metrics] = read_metrics(RunDirectory(config.run_dir).metrics_file("train", k))
        assert [metrics[f"groups_{kind}"] for kind in ("right", "mixed", "wrong")] == [
            data[kind] for kind in ("right", "mixed", "wrong")
        ]
        assert data["right"] + data["mixed"] + data["wrong"] <= len(rows)
        trained = _rewards(trajectories(config, k))
        assert trained == {group: sorted(row["rewards"]) for group, row in sealed.items()}
        for row in sealed.values():
            least = row["need"] if rules.least_sessions is None else min(rules.least_sessions, row["need"])
            assert least <= len(row["scores"]) <= row["need"] <= row["size"]
    assert len(told) == len(set(told)), "a group is told twice"


def _num_sessions(config: RunConfig) -> dict[int, int]:
    """How many sessions counted in the groups of a run that chooses; empty of another run."""
    if not config.rollout.chooses:
        return {}
    rows = [row for k in range(config.train.iterations) for row in outcomes(config, k)]
    return {row["number"]: len(row["scores"]) for row in rows}


def _rewards(rows: pa.Table) -> dict[str, list[float]]:
    """Rewards of the sessions of each group."""
    rewards: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for row in rows.select(["group_id", "session_id", "reward"]).to_pylist():
        rewards[row["group_id"]][row["session_id"]] = row["reward"]
    return {group: sorted(sessions.values()) for group, sessions in rewards.items()}


def held_out(config: RunConfig) -> tuple[float, float]:
    """Mean reward before the first iteration and after the last one."""
    committed = manifests(config)
    first, last = (committed[k, "evaluate"]["data"] for k in (0, config.train.iterations))
    assert first["num_tasks"] == last["num_tasks"] == config.evaluate.num_tasks
    assert first["failed"] == last["failed"] == 0
    return first["reward_mean"], last["reward_mean"]
