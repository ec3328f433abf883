"""Sealing: finished sessions leave the data plane as trajectory files in the run directory.

A batch is sealed once; later requests get the same answer. The journal keeps the groups of the last sealed
batch, because its flow may not have committed the answer.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, get_args

import numpy as np

from sf_core.config.failures import REASONS, count_failures, failures_text
from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.runs import events
from sf_core.dataplane.runs.effects import compaction
from sf_core.dataplane.runs.results import row_of
from sf_core.dataplane.runs.run import ServedRun
from sf_core.dataplane.sessions.claims import SessionSlot
from sf_core.dataplane.sessions.finished import FinishedSession
from sf_core.recipes.gates import Kind, kind_of
from sf_core.recipes.outcomes import Success
from storage.outcomes import write_outcomes
from storage.run_directory import RunDirectory
from storage.trajectories import Trajectory, TrajectoryKind, write_trajectories

Sealed = dict[str, Any]


class Sealer:
    """Writes the batches and evaluations of one run."""

    def __init__(self, run: ServedRun) -> None:
        self._run = run
        self._sealed: dict[tuple[str, int], asyncio.Task[Sealed]] = {}

    async def seal_batch(self, batch: int, attempt: int) -> Sealed:
        """Raises ApiError 409 if the batch is not ready or the attempt was superseded."""
        return await self._once("trajectories", batch, attempt, self._write_batch)

    async def seal_evaluation(self, version: int, attempt: int) -> Sealed:
        return await self._once("evaluations", version, attempt, self._write_evaluation)

    def forget(self) -> None:
        self._sealed.clear()

    async def _once(
        self, kind: str, index: int, attempt: int, write: Callable[[int, int], Awaitable[Sealed]]
    ) -> Sealed:
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

    async def _write_batch(self, index: int, attempt: int) -> Sealed:
        run = self._run
        if index in run.answers:
            return run.answers[index]
        try:
            if index not in run.manager.batches:
                self._refuse_failed(index)
            batch = run.manager.seal(index)
        except ValueError as error:
            raise ApiError(409, str(error)) from None
        for dropped in batch.dropped:
            # before what is known of it is stored elsewhere
            rejected = events.Rejected(dropped, batch.rejected[dropped])
            run.journal.note(rejected)
            run.effects.apply(rejected)
        run.changed.notify()
        sessions = run.results_of(batch.groups)
        answer = await write_sessions(run, "trajectories", index, f"rollout-{attempt}", sessions)
        if run.spec.rollout.chooses:
            answer |= await self._write_outcomes(index, f"rollout-{attempt}")
        if run.spec.rollout.spare_sessions:
            answer |= run.results.lengths(batch.groups, sessions)
        for group in batch.groups:
            run.effects.drop_results(group)
        min_versions = [s.min_version for s in sessions if s.min_version is not None]
        answer |= {
            "groups": batch.groups,
            "rejected": {str(group): reason for group, reason in batch.rejected.items()},
            "failures": count_failures(session.status for session in sessions),
            "discarded": dict(run.outcomes.discarded),
            "last_error": run.outcomes.last_error,
            "max_lag": index - min(min_versions, default=index),
        }
        await run.journal.append(events.Sealed(index, batch, answer))
        run.outcomes.forget_discarded(answer)
        await run.compact(partial(compaction, run))
        # counted last, because everything above is repeated if it fails
        run.count("sealed_groups", len(batch.groups))
        for dropped in batch.dropped:
            run.count(f"rejected_groups.{batch.rejected[dropped]}")
        for kind in answer.keys() & set(get_args(Kind)):
            run.count(f"groups.{kind}", answer[kind])
        return answer

    async def _write_outcomes(self, index: int, part: str) -> Sealed:
        """Write what came of the groups that have left since the last batch, and count those of which all
        sessions, some or none were right. Groups from outside, and those without results, are not counted."""
        run = self._run
        outcomes = run.manager.ended_by[index]
        directory = RunDirectory(run.spec.run_dir)
        rows = [row_of(outcome, run.spec.run_id) for outcome in outcomes]
        ref = await asyncio.to_thread(write_outcomes, directory, index, rows, part)
        success = run.spec.rollout.success or Success()
        kinds = Counter(kind_of(one.results, success) for one in outcomes if one.pick and one.results)
        return {"outcomes": [asdict(ref)], **{kind: kinds[kind] for kind in get_args(Kind)}}

    def _refuse_failed(self, index: int) -> None:
        """Raises ValueError if every session of the batch failed by its agent or its reward."""
        run = self._run
        sessions = run.results_of(chosen := run.manager.choose(index))
        if not all(failed_by_itself(session, run.spec.was_warmed) for session in sessions):
            return
        counts = failures_text(count_failures(session.status for session in sessions))
        last = sessions[-1].error or run.outcomes.last_error
        fault = f"every session of batch {index} failed ({counts}); the last: {last}"
        groups = [g for g in run.manager.groups.values() if g.index in chosen or not g.is_outside]
        run.endings.end_run_by(fault, "all_failed", groups)
        raise ValueError(fault)

    async def _write_evaluation(self, version: int, attempt: int) -> Sealed:
        run = self._run
        group = run.manager.evaluations.get(version)
        if group is None or not group.is_complete:
            raise ApiError(409, f"the evaluation of version {version} is not done")
        places = [SessionSlot("holdout", version, task) for task in range(group.size)]
        sessions = [run.results.by_place[place] for place in places if place in run.results.by_place]
        answer = await write_sessions(run, "evaluations", version, f"evaluation-{attempt}", sessions)
        for place in places:
            run.results.drop(place)
        for older in [v for v in run.manager.evaluations if v < version]:
            del run.manager.evaluations[older]
        # after a restart there are those of the last sealed evaluation, from the journal
        for place in [p for p in run.results.by_place if p.split == "holdout" and p.group < version]:
            run.results.drop(place)
        by_environment: dict[str, list[float]] = defaultdict(list)
        for session in sessions:
            if session.environment or session.status not in REASONS:  # unknown if it failed at once
                by_environment[session.environment].append(session.reward)
        failures = count_failures(session.status for session in sessions)
        # read again with fewer rollout.session_attempts, a journal ends tasks that have no result
        num_missing = group.size - len(sessions)
        earned = sum(session.reward for session in sessions) + num_missing * run.spec.rollout.failed_reward
        return answer | {
            "version": version,
            "num_tasks": group.size,
            "failed": num_missing + sum(failures.values()),
            "failures": failures,
            "reward_mean": earned / group.size,
            "by_environment": {name: float(np.mean(rewards)) for name, rewards in by_environment.items()},
        }


def failed_by_itself(session: FinishedSession, was_warmed: bool) -> bool:
    """Whether a session failed by its agent or its reward, not by what the policy sampled. Calls that cannot
    be parsed are the policy's fault if a warm start has shown it how to write them."""
    if session.status not in ("agent_error", "reward_error", "unparsed_call"):
        return False
    turns = session.trajectories[-1].turns if session.trajectories else ()
    was_cut = bool(turns) and turns[-1].finish_reason == "length"
    return not (was_cut or (session.status == "unparsed_call" and was_warmed))


async def write_sessions(
    run: ServedRun, kind: TrajectoryKind, index: int, part: str, sessions: Sequence[FinishedSession]
) -> Sealed:
    """Write one file and describe what it holds. Raises ApiError 500 if it cannot be written."""
    directory = RunDirectory(run.spec.run_dir)

    def write() -> Sealed:
        rows = [row for session in sessions for row in session.trajectories]
        ref = write_trajectories(directory, index, rows, part, kind)
        return {"files": [asdict(ref)], "branches": len(rows), **_sums(rows)}

    try:
        written = await asyncio.to_thread(write)
    except OSError as error:
        raise ApiError(500, f"{kind} {index} cannot be written: {error}.") from error
    rewards = [session.reward for session in sessions]
    mean = float(np.mean(rewards)) if rewards else 0.0
    bounds = {"reward_min": min(rewards), "reward_max": max(rewards)} if rewards else {}
    return written | {"sessions": len(sessions), "reward_mean": mean, **bounds}


def _sums(rows: Sequence[Trajectory]) -> Sealed:
    own = [turn for row in rows for turn in row.turns if turn.end > row.shared_prefix]
    ends = [turn.finish_reason for turn in own if turn.finish_reason is not None]
    return {
        "sampled_tokens": sum(int(row.loss_mask.sum()) for row in rows),
        "interruptions": sum(row.interruptions for row in rows),
        "answers": len(ends),
        "cut_answers": ends.count("length"),
    }
