"""Sealing: finished sessions leave the data plane as trajectory files in the run directory.

A batch is sealed once; later requests get the same answer. The journal keeps the groups of the last sealed
batch, because its flow may not have committed the answer. Sessions of no group are stored as they finish;
until then they are in the journal (events.py), where a restart finds them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import islice
from typing import Any, get_args

import numpy as np

from sf_core.config.rollout_config import REASONS, count_failures, failures_text
from sf_core.dataplane.errors import ApiError, unwritable
from sf_core.dataplane.runs import decide
from sf_core.dataplane.runs.events import Sealed, Stored
from sf_core.dataplane.runs.ledger import Batch
from sf_core.dataplane.runs.results import row_of
from sf_core.dataplane.runs.run import ServedRun
from sf_core.dataplane.sessions.claims import SessionSlot
from sf_core.dataplane.sessions.finished import FinishedSession, summarise
from sf_core.recipes.gates import Kind, kind_of
from sf_core.recipes.outcomes import SEALED, Outcome, Success
from storage.run_directory import RunDirectory
from storage.tables.judgements import write_judgements
from storage.tables.outcomes import write_outcomes
from storage.tables.schema import Trajectory
from storage.tables.trajectories import TrajectoryKind, write_trajectories

log = logging.getLogger(__name__)

MAX_TOGETHER = 256
"""Most external sessions of a file."""

RETRY_S = 10.0
"""Seconds after a storage error in which no external session is written."""

SPARE_BYTES = 64 * 2**20
"""The journal is compacted when it has outgrown twice its size after the last compaction by this much."""

Answer = dict[str, Any]


class Sealer:
    """Writes the batches and evaluations of one run."""

    def __init__(self, run: ServedRun) -> None:
        self._run = run
        self._sealed: dict[tuple[str, int], asyncio.Task[Answer]] = {}

    async def seal_batch(self, batch: int, attempt: int) -> Answer:
        """Raises ApiError 409 if the batch is not ready or the attempt was superseded."""
        return await self._once("trajectories", batch, attempt, self._write_batch)

    async def seal_evaluation(self, version: int, attempt: int) -> Answer:
        return await self._once("evaluations", version, attempt, self._write_evaluation)

    def forget(self) -> None:
        self._sealed.clear()

    async def _once(
        self, kind: str, index: int, attempt: int, write: Callable[[int, int], Awaitable[Answer]]
    ) -> Answer:
        if attempt < self._run.spec.attempt:
            raise ApiError.superseded(self._run.spec.run_id, attempt)
        task = self._sealed.get((kind, index))
        if task is None:
            task = self._sealed[kind, index] = asyncio.ensure_future(write(index, attempt))
            self._sealed.pop((kind, index - 2), None)
        try:
            return await asyncio.shield(task)
        except Exception:
            # writing may succeed the next time; the groups of the batch stay chosen
            self._sealed.pop((kind, index), None)
            raise

    async def _write_batch(self, index: int, attempt: int) -> Answer:
        run = self._run
        state = self._run.state
        if index in state.answers:
            return state.answers[index]
        run.journal.check()
        try:
            batch = decide.choose(state.ledger, index)
            self._refuse_failed(index, batch)
        except ValueError as error:
            raise ApiError(409, str(error)) from None
        # before what is known of them is stored elsewhere
        run.reject(batch.dropped, "max_lag")
        outcomes = [*state.ledger.ended, *(state.ledger.groups[g].outcome(SEALED) for g in batch.groups)]
        run.changed.notify()
        sessions = state.results_of(batch.groups)
        answer = await write_sessions(run, "trajectories", index, f"rollout-{attempt}", sessions)
        if run.spec.rollout.chooses:
            answer |= await self._write_outcomes(index, outcomes, f"rollout-{attempt}")
        if run.spec.rollout.spare_sessions:
            answer |= state.results.lengths(batch.groups, sessions)
        if run.state is not state:
            raise ApiError.superseded(run.spec.run_id, attempt)
        min_versions = [s.min_version for s in sessions if s.min_version is not None]
        answer |= {
            "groups": batch.groups,
            "rejected": {str(group): reason for group, reason in batch.rejected.items()},
            "failures": count_failures(session.status for session in sessions),
            "discarded": dict(state.recent.discarded),
            "last_error": state.recent.last_error,
            **state.recent.reports,
            **run.effort.totals(run.router.engines),
            "max_lag": index - min(min_versions, default=index),
        }
        state.recent.reports.clear()
        await run.record_now(Sealed(index, batch, answer))
        await run.compact()
        run.counters["sealed_groups"] += len(batch.groups)
        for kind in answer.keys() & set(get_args(Kind)):
            run.counters[f"groups.{kind}"] += answer[kind]
        return answer

    async def _write_outcomes(self, index: int, outcomes: Sequence[Outcome], part: str) -> Answer:
        """Write what came of the groups that have left since the last batch, and count those of which all
        sessions, some or none were right. External groups, and those without results, are not counted.
        Raises ApiError 503 or 500 if the file cannot be written."""
        run = self._run
        directory = RunDirectory(run.spec.run_dir)
        rows = [row_of(outcome, run.spec.run_id) for outcome in outcomes]
        try:
            ref = await asyncio.to_thread(write_outcomes, directory, index, rows, part)
        except OSError as error:
            raise unwritable(f"the outcomes of batch {index}", error) from error
        success = run.spec.rollout.success or Success()
        counted = [outcome for outcome in outcomes if outcome.pick and outcome.results]
        kinds = Counter(kind_of(outcome.results, success) for outcome in counted)
        return {"outcomes": [asdict(ref)], **{kind: kinds[kind] for kind in get_args(Kind)}}

    def _refuse_failed(self, index: int, batch: Batch) -> None:
        """Raises ValueError if every session of the batch failed by its agent or its reward."""
        run = self._run
        sessions = run.state.results_of(batch.groups)
        if not all(has_failed_by_itself(session, run.spec.was_warmed) for session in sessions):
            return
        counts = failures_text(count_failures(session.status for session in sessions))
        last = sessions[-1].error or run.state.recent.last_error
        fault = f"every session of batch {index} failed ({counts}); last error: {last}"
        groups = run.state.ledger.groups.values()
        run.end_by(fault, "all_failed", [g for g in groups if g.index in batch.groups or not g.is_external])
        raise ValueError(fault)

    async def _write_evaluation(self, version: int, attempt: int) -> Answer:
        run = self._run
        results = self._run.state.results
        group = run.state.ledger.evaluations.get(version)
        if group is None or not group.is_complete:
            raise ApiError(409, f"the evaluation of version {version} is not done")
        slots = [SessionSlot("holdout", version, task) for task in range(group.size)]
        sessions = [results.by_slot[slot] for slot in slots if slot in results.by_slot]
        answer = await write_sessions(run, "evaluations", version, f"evaluation-{attempt}", sessions)
        run.state.close_evaluation(version)
        by_environment: dict[str, list[float]] = defaultdict(list)
        for session in sessions:
            # the environment is unknown of one that failed at once
            if session.reward is not None and (session.environment or session.status not in REASONS):
                by_environment[session.environment].append(session.reward)
        failures = count_failures(session.status for session in sessions)
        # read again with fewer rollout.session_attempts, a journal ends tasks that have no result
        num_missing = group.size - len(sessions)
        rewards = [session.reward for session in sessions if session.reward is not None]
        earned = sum(rewards) + num_missing * run.spec.rollout.failed_reward
        if num_unjudged := len(sessions) - len(rewards):
            answer["unjudged"] = num_unjudged
        return answer | {
            "version": version,
            "num_tasks": group.size,
            "failed": num_missing + sum(failures.values()),
            "failures": failures,
            "reward_mean": earned / (group.size - num_unjudged),
            "by_environment": {name: float(np.mean(rewards)) for name, rewards in by_environment.items()},
        }


class ExternalSessions:
    """Writes the external sessions of one run, one file after the other.

    A file is named after the oldest session that is not known to be stored. If the process is killed after a
    write and before its record, the next process begins with that session again and writes a file of the same
    name that holds at least the same sessions: each is in exactly one file.
    """

    def __init__(self, run: ServedRun) -> None:
        self._run = run
        self._one_at_a_time = asyncio.Lock()
        self._storing: asyncio.Task[None] | None = None
        self._retry_at = 0.0
        self._compacted_bytes = 0

    def store_soon(self) -> None:
        """Start storing; to be called periodically, so that sessions that finish in between share a file."""
        is_busy = self._storing is not None and not self._storing.done()
        if self._run.state.results.external and not is_busy and time.monotonic() >= self._retry_at:
            self._storing = asyncio.ensure_future(self.store_or_try_later())

    async def store_or_try_later(self) -> None:
        try:
            await self.store()
        except Exception as error:
            # whatever it is, the sessions wait for the next time
            self._retry_at = time.monotonic() + RETRY_S
            num_waiting = len(self._run.state.results.external)
            log.warning(
                "run %s: %d opened sessions wait to be written: %s",
                self._run.spec.run_id,
                num_waiting,
                error,
                exc_info=not isinstance(error, (ApiError, OSError)),
            )

    async def store(self) -> None:
        """Write all finished ones. Raises ApiError or OSError; those that are not written stay."""
        async with self._one_at_a_time:
            while self._run.state.results.external:
                await self._store_oldest()

    async def close(self) -> None:
        """Stop storing; returns when nothing is being written, or the journal cannot be."""
        with suppress(ApiError):
            await self._run.journal.await_unless_failing(self._end())

    async def _end(self) -> None:
        async with self._one_at_a_time:
            if self._storing is not None:
                self._storing.cancel()

    async def _store_oldest(self) -> None:
        run = self._run
        run.journal.check()
        unstored = run.state.results.external.values()
        oldest = next(iter(unstored))
        version = _newest_version(oldest)
        of_version = (result for result in unstored if _newest_version(result) == version)
        stored = list(islice(of_version, MAX_TOGETHER))
        await write_sessions(run, "opened", version, oldest.session_id, stored)
        await run.record_now(Stored([result.session_id for result in stored]))
        if run.journal.path.stat().st_size > 2 * self._compacted_bytes + SPARE_BYTES:
            # sealing compacts too, but a run with external sessions may never seal a batch
            await run.compact()
            self._compacted_bytes = run.journal.path.stat().st_size


def _newest_version(result: FinishedSession) -> int:
    return result.max_version or 0


def has_failed_by_itself(session: FinishedSession, was_warmed: bool) -> bool:
    """Whether a session failed by its agent or its reward, not by what the policy sampled. Calls that cannot
    be parsed are the policy's fault if a warm start has shown it how to write them."""
    if session.status not in ("agent_error", "reward_error", "unparsed_call"):
        return False
    turns = session.trajectories[-1].turns if session.trajectories else ()
    was_cut = bool(turns) and turns[-1].finish_reason == "length"
    return not (was_cut or (session.status == "unparsed_call" and was_warmed))


async def write_sessions(
    run: ServedRun, kind: TrajectoryKind, index: int, part: str, sessions: Sequence[FinishedSession]
) -> Answer:
    """Write one file and describe what it holds; and one of what judges were asked, if they were. Raises
    ApiError 503 or 500 if it cannot be written."""
    try:
        answer = await asyncio.to_thread(_write_rows, run, kind, index, part, sessions)
    except OSError as error:
        raise unwritable(f"the session file of {kind} {index}", error) from error
    rewards = [session.reward for session in sessions if session.reward is not None]
    answer["sessions"] = len(sessions)
    answer["reward_mean"] = float(np.mean(rewards)) if rewards else 0.0
    if rewards:
        answer["reward_min"] = min(rewards)
        answer["reward_max"] = max(rewards)
    return answer


def _write_rows(
    run: ServedRun, kind: TrajectoryKind, index: int, part: str, sessions: Sequence[FinishedSession]
) -> Answer:
    directory = RunDirectory(run.spec.run_dir)
    rows = [row for session in sessions for row in session.trajectories]
    is_multimodal = run.renderer.image_processor is not None
    file = write_trajectories(directory, index, rows, part, kind, is_multimodal=is_multimodal)
    answer = {"files": [asdict(file)], "branches": len(rows), **_sums(rows)}
    judgements = [(session.session_id, row) for session in sessions for row in session.judgements]
    if judgements and kind != "opened":
        file = write_judgements(directory, index, judgements, part, kind)
        answer["judgements"] = [asdict(file)]
        answer |= summarise(row for _, row in judgements)
    return answer


def _sums(rows: Sequence[Trajectory]) -> Answer:
    own = [turn for row in rows for turn in row.turns if turn.end > row.shared_prefix]
    ends = [turn.finish_reason for turn in own if turn.finish_reason is not None]
    return {
        "sampled_tokens": sum(int(row.loss_mask.sum()) for row in rows),
        "interruptions": sum(row.interruptions for row in rows),
        "answers": len(ends),
        "cut_answers": ends.count("length"),
    }
