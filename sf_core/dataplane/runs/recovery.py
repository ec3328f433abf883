"""Recovery of a run from its journal after the data plane died.

Owns the reading of a journal, its registrations, and what a compacted journal must still hold. A restarted
data plane opens by itself the runs that were open (open_runs.py). A run that a flow registers is restored
from its journal first, and then registered like one that was open all the time. What other records do to a
run is in effects.py, their form in records.py and turn_records.py, their framing in journal.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from sf_core.dataplane.bodies import RunSpec
from sf_core.dataplane.chat.renderer import Renderer, read_renderer
from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.journal.journal import Compaction, Journal, Record, kind_of
from sf_core.dataplane.runs.records import (
    gateways_of,
    paused_record,
    places,
    read_opened,
    revoked_record,
    run_record,
)
from sf_core.dataplane.runs.rollout_manager import Batch
from sf_core.dataplane.runs.run import ServedRun, rules_of
from sf_core.dataplane.runs.runners import Runner
from sf_core.dataplane.sessions.finished import FinishedSession, read_finished
from sf_core.dataplane.sessions.memory import Memory
from sf_core.dataplane.turns.recovery import TURN_KINDS, replay_turn, session_of

Answers = dict[int, dict[str, Any]]
"""Answers to the seals of batches, by batch, to be repeated on request."""

Past = list[Record | FinishedSession]

MakeRun = Callable[[RunSpec, Renderer, Journal, float, Memory], ServedRun]


async def open_run(
    spec: RunSpec, journal: Journal, grace_s: float, memory: Memory, make: MakeRun = ServedRun
) -> tuple[ServedRun, Answers]:
    """Open a registered run, restored from its journal if that holds it. Raises ApiError if it cannot."""
    reopened = await reopen_run(journal, grace_s, memory, make)
    if reopened is None:
        run = make(spec, await read_renderer(spec.model_dir), journal, grace_s, memory)
        answers: Answers = {}
    else:
        run, answers = reopened
        if begin_attempt(run, spec, await read_past(run, spec)):
            answers.clear()
    try:
        await journal.append(run_record(spec, run.num_gateways))
    except ApiError:
        run.leave_memory()
        raise
    return run, answers


async def reopen_run(
    journal: Journal, grace_s: float, memory: Memory, make: MakeRun = ServedRun
) -> tuple[ServedRun, Answers] | None:
    """Restore a run from its journal; None if that holds none. Raises ApiError if it cannot be opened."""
    replaying: _Replay | None = None
    async with aclosing(journal.replay()) as records:
        async for record in records:
            if replaying is not None:
                await replaying.apply(record)
            elif "run" in record:
                spec = RunSpec.model_validate(record["run"])
                renderer = await read_renderer(spec.model_dir)
                replaying = _Replay(make(spec, renderer, journal, grace_s, memory), record)
            else:
                break
    return None if replaying is None else await replaying.finish()


async def read_past(run: ServedRun, spec: RunSpec, num_records: int | None = None) -> Past:
    """Results, rejections and claims in the first `num_records` records of the journal (None: in all), if
    this registration makes the run start over; nothing if the run goes on."""
    past: Past = []
    if run.knows_batch(spec.iteration) or spec.attempt < run.spec.attempt:
        return past
    async with aclosing(run.journal.replay()) as records:
        async for record in records:
            if num_records == 0:
                break
            num_records = None if num_records is None else num_records - 1
            match kind_of(record):
                case "rejected" | "opened":
                    past.append(record)
                case "finished" if record["finished"] and record["finished"][0] == "train":
                    past.append(read_finished(record))
    return past


def begin_attempt(run: ServedRun, spec: RunSpec, past: Past) -> bool:
    """Begin an attempt of the flow. True if the run starts over from the progress that `spec` states: then
    only `past` is taken over from the journal."""
    run.begin_attempt(spec)
    if run.knows_batch(spec.iteration):
        run.manager.rules = rules_of(spec)
        return False
    run.forget_progress()
    for item in past:
        if isinstance(item, FinishedSession):
            run.effects.restored(item)
        elif kind_of(item) == "rejected":
            run.effects.rejected(*item["rejected"])
        else:
            for session in read_opened(item):
                if session.claim is not None:
                    run.manager.restore_attempt(session.claim)
    return True


class _Replay:
    """Applies the records of a journal to a new run, one by one."""

    def __init__(self, run: ServedRun, first: Record) -> None:
        self._run = run
        self._answers: Answers = {}
        self._num_applied = 1
        """Number of records applied, with the first one, which made the run."""
        self._num_gateways = gateways_of(first)
        """Number of gateway processes of the data plane that last wrote this journal."""

    async def apply(self, record: Record) -> None:
        run = self._run
        match kind_of(record):
            case "run":
                spec = RunSpec.model_validate(record["run"])
                if begin_attempt(run, spec, await read_past(run, spec, self._num_applied)):
                    self._answers.clear()
                self._num_gateways = gateways_of(record)
            case kind if kind in TURN_KINDS:
                replay_turn(run, record)
            case kind:
                run.effects.apply(record)
                if kind == "sealed":
                    self._answers[record["sealed"]] = record["answer"]
        self._num_applied += 1

    async def finish(self) -> tuple[ServedRun, Answers]:
        """The restored run. Raises ApiError if its open sessions cannot go on in this data plane."""
        run = self._run
        for session in list(run.sessions.values()):
            if session.claim is not None and run.manager.group_of(session.claim) is None:
                run.forget(session.session_id)
            elif session.runner:
                # a runner that died meanwhile is found silent as any other
                run.runners.setdefault(session.runner, Runner(run.spec.attempt))
        if self._num_gateways != run.num_gateways:
            self._check_gateways()
            await run.journal.append(run_record(run.spec, run.num_gateways))
        return run, self._answers

    def _check_gateways(self) -> None:
        """Raises ApiError if sessions are open: every gateway process has the turns of its sessions in its
        own journal, so that only the same number of processes can go on with them."""
        run, before = self._run, self._num_gateways
        if run.sessions:
            run.leave_memory()
            raise ApiError(
                409,
                f"Run {run.spec.run_id} has open sessions, whose turns {before} gateway processes recorded; "
                f"this data plane has {run.num_gateways}: start it with --gateways {before}.",
            )


def compaction(run: ServedRun) -> Compaction:
    """All that a restart could need now, with the last sealed batch: its flow may not have committed it."""
    manager, weights = run.manager, run.router.weights
    last = manager.next_batch - 1
    batch = manager.batches.get(last, Batch([], {}))
    iteration = last if last in manager.batches else manager.next_batch
    groups = {*batch.groups, *batch.rejected, *manager.groups, *manager.rejected}
    newest_evaluation = max(manager.evaluations, default=0)
    sessions, opened, is_released = run.unfinished, set(run.results.opened), run.released
    spec = {
        "iteration": iteration,
        "version": weights.version,
        "weights_uri": weights.uri,
        "done_groups": manager.done_before(iteration),
    }
    registered = run_record(run.spec.model_copy(update=spec), run.num_gateways)
    head = [registered, *map(revoked_record, sorted(run.revoked_leases))]
    head += [paused_record(None)] if run.router.paused else []
    head += map(paused_record, sorted(run.router.paused_engines))

    def keep(record: Record) -> bool:
        match kind_of(record):
            case "run" | "weights" | "revoked" | "paused" | "resumed" | "closed":
                return False
            case "evaluation":
                return bool(record["evaluation"][0] >= newest_evaluation)
            case "sealed":
                return bool(record["sealed"] == last)
            case kind if kind in TURN_KINDS:
                return session_of(record) in sessions
            case "rewarded" | "named" | "answered" as kind:
                return record[kind] in sessions
            case "opened" if any(session[0] in sessions for session in record["opened"]):
                return True
            case "finished" if record["finished"] is None:
                return record["session"] in opened or record["session"] in sessions
            case "stored":
                return not opened.isdisjoint(record["stored"])
            case "released":
                return is_released
        return any(
            index in groups if split == "train" else index >= newest_evaluation
            for split, index in places(record)
        )

    return head, keep
