"""A run as it was before the data plane died: its journal, replayed.

Owns what every record does to a run, and what a compacted journal must still hold. A restarted data plane
opens by itself the runs that were open (open_runs.py); a run that a flow registers is opened from its journal
first, and then registered like one that was open all the time. Records of turns are in turn_recovery.py,
framing is in journal.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.groups import Claim
from sf_core.dataplane.journal import Journal, Record
from sf_core.dataplane.records import (
    kind_of,
    places,
    read_claim,
    read_finished,
    read_opened,
    revoked_record,
    run_record,
)
from sf_core.dataplane.rendering import Renderer
from sf_core.dataplane.rollout_manager import Batch
from sf_core.dataplane.run import Run, Runner, read_renderer, session_name
from sf_core.dataplane.session import Session
from sf_core.dataplane.specs import RunSpec
from sf_core.dataplane.turn_recovery import TURN_KINDS, TurnReplay, session_of
from sf_core.types import WeightsRef

log = logging.getLogger(__name__)

Answers = dict[int, dict[str, Any]]
"""What was said of each sealed batch, to be said again."""


MakeRun = Callable[[RunSpec, Renderer, Journal, float], Run]


async def open_run(
    spec: RunSpec, journal: Journal, grace_s: float, make: MakeRun = Run
) -> tuple[Run, Answers]:
    """A registered run, with all that its journal knows of it. Raises ApiError if it cannot be opened."""
    records = await journal.replay()
    known = _first_spec(records)
    run = make(known or spec, await read_renderer(spec.model_dir), journal, grace_s)
    answers = replay(run, records[1:]) if known else {}
    _check_gateways(run, records)
    if known and begin_attempt(run, spec, records):
        answers = {}
    await journal.append(run_record(spec, run.num_gateways))
    return run, answers


async def reopen_run(journal: Journal, grace_s: float, make: MakeRun = Run) -> tuple[Run, Answers] | None:
    """A run as its journal has it; None if there is nothing in it. Raises ApiError if it cannot be opened."""
    records = await journal.replay()
    if (spec := _first_spec(records)) is None:
        return None
    run = make(spec, await read_renderer(spec.model_dir), journal, grace_s)
    answers = replay(run, records[1:])
    _check_gateways(run, records)
    if _num_gateways(records) != run.num_gateways:
        await journal.append(run_record(run.spec, run.num_gateways))
    return run, answers


def _check_gateways(run: Run, records: list[Record]) -> None:
    """Each gateway process has the turns of its sessions in a journal of its own: only as many as there were
    can go on with open sessions."""
    if run.sessions and (before := _num_gateways(records)) != run.num_gateways:
        raise ApiError(
            409,
            f"Run {run.spec.run_id} has open sessions in the journals of {before} gateway processes, this "
            f"data plane has {run.num_gateways}: start it with --gateways {before}.",
        )


def _num_gateways(records: list[Record]) -> int:
    """Of the last process that wrote here."""
    return next((record.get("gateways", 1) for record in reversed(records) if "run" in record), 1)


def begin_attempt(run: Run, spec: RunSpec, records: list[Record]) -> bool:
    """An attempt of the flow begins. True if the run starts over from what this flow says is done: then only
    results are taken from `records`, the journal so far."""
    run.begin_attempt(spec)
    if run.knows_batch(spec.iteration):
        run.manager.rules = spec.rules
        return False
    run.forget_progress()
    for record in records:
        match kind_of(record):
            case "rejected":
                run.manager.restore_rejected(*record["rejected"])
            case "opened":
                for session in read_opened(record):
                    if session.claim is not None:
                        run.manager.restore_attempt(session.claim)
            case "finished" if record["finished"][0] == "train":
                _take_back(run, record)
    return True


def replay(run: Run, records: list[Record]) -> Answers:
    """Bring a new run to where its records end."""
    replaying = _Replay(run)
    for i, record in enumerate(records):
        if "run" in record:
            spec = RunSpec.model_validate(record["run"])
            if begin_attempt(run, spec, records[:i]):
                replaying.answers.clear()
        else:
            replaying.apply(record)
    replaying.finish()
    return replaying.answers


class _Replay:
    def __init__(self, run: Run) -> None:
        self.answers: Answers = {}
        self._run = run
        self._turns = TurnReplay(run)

    def apply(self, record: Record) -> None:
        run, manager = self._run, self._run.manager
        match kind_of(record):
            case "weights":
                run.router.weights = WeightsRef(*record["weights"])
                manager.set_version(run.router.weights.version)
            case "evaluation":
                manager.start_evaluation(*record["evaluation"])
            case "opened":
                self._open(read_opened(record))
            case "rewarded":
                if (session := run.sessions.get(record["rewarded"])) is not None:
                    session.reward, session.reward_parts = record["reward"], record["parts"]
            case "closed":
                run.sessions.pop(record["closed"], None)
            case "lost":
                manager.lose(self._end(record["lost"]))
            case "failed":
                manager.fail(self._end(record["failed"]))
            case "finished":
                self._end(record["finished"])
                _take_back(run, record)
            case "rejected":
                index, reason = record["rejected"]
                manager.restore_rejected(index, reason)
                run.drop_group(index)
            case "sealed":
                self._seal(record)
            case "revoked":
                run.revoked_leases.add(record["revoked"])
            case "released":
                run.release()
            case kind if kind in TURN_KINDS:
                self._turns.apply(record)

    def finish(self) -> None:
        run = self._run
        self._turns.finish()
        for session in list(run.sessions.values()):
            if session.claim is not None and run.manager.group_of(session.claim) is None:
                del run.sessions[session.session_id]
            if session.claim is not None:
                # a runner that died meanwhile is missed as any other
                run.runners.setdefault(session.runner, Runner(run.spec.attempt, time.monotonic()))

    def _open(self, sessions: list[Session]) -> None:
        for session in sessions:
            if session.claim is None or self._run.manager.restore_running(session.claim):
                self._run.open(session)

    def _end(self, value: list[Any]) -> Claim:
        claim = read_claim(value)
        self._run.sessions.pop(session_name(self._run.spec.run_id, claim), None)
        return claim

    def _seal(self, record: Record) -> None:
        batch = Batch(**record["batch"])
        self._run.manager.restore_sealed(record["sealed"], batch)
        for group in (*batch.groups, *batch.rejected):
            self._run.drop_group(group)
        self.answers[record["sealed"]] = record["answer"]


def _take_back(run: Run, record: Record) -> None:
    finished = read_finished(record)
    rejected = run.manager.restore_finished(finished.claim, finished.reward, finished.min_version)
    if not rejected and run.manager.is_done(finished.claim):
        run.results[finished.claim.place] = finished


def _first_spec(records: list[Record]) -> RunSpec | None:
    return RunSpec.model_validate(records[0]["run"]) if records and "run" in records[0] else None


def compaction(run: Run) -> tuple[list[Record], Callable[[Record], bool]]:
    """The head of a compacted journal, and which of its records to keep: all that a restart could need, as
    of now. The last sealed batch is among it, because its flow may not have committed it."""
    manager, weights = run.manager, run.router.weights
    last = manager.next_batch - 1
    batch = manager.batches.get(last, Batch([], {}))
    iteration = last if last in manager.batches else manager.next_batch
    groups = {*batch.groups, *batch.rejected, *manager.groups, *manager.rejected}
    newest_evaluation = max(manager.evaluations, default=0)
    sessions, is_released = set(run.sessions), run.released
    spec = {
        "iteration": iteration,
        "version": weights.version,
        "weights_uri": weights.uri,
        "done_groups": manager.done_before(iteration),
    }
    registered = run_record(run.spec.model_copy(update=spec), run.num_gateways)
    head = [registered, *map(revoked_record, sorted(run.revoked_leases))]

    def keep(record: Record) -> bool:
        match kind_of(record):
            case "run" | "weights" | "revoked" | "closed":
                return False
            case "evaluation":
                return bool(record["evaluation"][0] >= newest_evaluation)
            case "sealed":
                return bool(record["sealed"] == last)
            case kind if kind in TURN_KINDS:
                return session_of(record) in sessions
            case "rewarded":
                return record["rewarded"] in sessions
            case "opened" if any(session[0] in sessions for session in record["opened"]):
                return True
            case "released":
                return is_released
        return any(
            index in groups if split == "train" else index >= newest_evaluation
            for split, index in places(record)
        )

    return head, keep
