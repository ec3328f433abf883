"""A run as it was before the data plane died: its journal, replayed.

Owns what every record does to a run, and what a compacted journal must still hold. A restarted data plane
opens by itself the runs that were open (open_runs.py); a run that a flow registers is opened from its journal
first, and then registered like one that was open all the time. Records are in records.py
and turn_records.py, framing in journal.py.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

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
from sf_core.dataplane.rollout_manager import Batch
from sf_core.dataplane.run import Run, Runner, read_renderer, session_name
from sf_core.dataplane.session import Session
from sf_core.dataplane.specs import RunSpec
from sf_core.dataplane.turn_records import RecordedTurn, Tokens, TurnKey, read_prompt, read_turn
from sf_core.types import FinishReason, WeightsRef

log = logging.getLogger(__name__)

Answers = dict[int, dict[str, Any]]
"""What was said of each sealed batch, to be said again."""


async def open_run(spec: RunSpec, journal: Journal, grace_s: float) -> tuple[Run, Answers]:
    """A registered run, with all that its journal knows of it. Raises ApiError if it cannot be opened."""
    records = await journal.replay()
    known = _first_spec(records)
    run = Run(known or spec, await read_renderer(spec.model_dir), journal, grace_s)
    answers = replay(run, records[1:]) if known else {}
    if known and begin_attempt(run, spec, records):
        answers = {}
    await journal.append(run_record(spec))
    return run, answers


async def reopen_run(journal: Journal, grace_s: float) -> tuple[Run, Answers] | None:
    """A run as its journal has it; None if there is nothing in it. Raises ApiError if it cannot be opened."""
    records = await journal.replay()
    if (spec := _first_spec(records)) is None:
        return None
    run = Run(spec, await read_renderer(spec.model_dir), journal, grace_s)
    return run, replay(run, records[1:])


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
        self._turns: dict[TurnKey, RecordedTurn] = {}
        """Those whose end has not been read yet."""
        self._chunks: defaultdict[TurnKey, list[Tokens]] = defaultdict(list)

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
            case "begun" | "chunk" | "turn" | "delivered" as kind:
                key = TurnKey(*record[kind][:3])
                # the records of a session that is over tell nothing any more
                if (session := run.sessions.get(key.session_id)) is not None:
                    self._apply_to_turn(kind, record, key, session)

    def finish(self) -> None:
        run = self._run
        for key, recorded in self._turns.items():
            recorded.tokens = self._tokens_of(key)
            self._note_versions(key, recorded.tokens)
        for session in list(run.sessions.values()):
            if session.claim is not None and run.manager.group_of(session.claim) is None:
                del run.sessions[session.session_id]
            session.recorded = _worth_keeping(session.recorded)
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

    def _apply_to_turn(self, kind: str, record: Record, key: TurnKey, session: Session) -> None:
        if kind == "begun":
            self._begin_turn(record, key, session)
        elif kind == "chunk":
            *tokens, engines = record["chunk"][3:]
            self._chunks[key].append(Tokens.of(*tokens))
            self._turns[key].engines = engines
        elif kind == "turn":
            self._end_turn(record, key, session)
        else:
            for recorded in session.recorded:
                recorded.delivered |= recorded.key == key

    def _begin_turn(self, record: Record, key: TurnKey, session: Session) -> None:
        for value in record["prompts"]:
            session.restore_prompt(read_prompt(value, session))
        prompt = session.prompts[key.prompt]
        nth, identity = record["begun"][3:]
        session.begin_sample(prompt, nth)
        recorded = self._turns[key] = RecordedTurn(key, identity, prompt)
        session.recorded.append(recorded)

    def _end_turn(self, record: Record, key: TurnKey, session: Session) -> None:
        recorded = self._turns.pop(key)
        turn = read_turn(record, recorded.prompt, self._tokens_of(key))
        session.restore_turn(turn)
        recorded.turn, recorded.engines = turn, turn.engine
        recorded.tokens = Tokens(turn.ids, turn.logprobs, turn.versions)
        if turn.finish_reason is FinishReason.ABORT:
            session.recorded.remove(recorded)
        else:
            self._note_versions(key, recorded.tokens)

    def _tokens_of(self, key: TurnKey) -> Tokens:
        return Tokens.joined(self._chunks.pop(key, []))

    def _note_versions(self, key: TurnKey, tokens: Tokens) -> None:
        session = self._run.sessions.get(key.session_id)
        if session is not None and session.claim is not None and len(tokens.versions):
            self._run.manager.note_started(session.claim, int(tokens.versions.min()))


def _take_back(run: Run, record: Record) -> None:
    finished = read_finished(record)
    rejected = run.manager.restore_finished(finished.claim, finished.reward, finished.min_version)
    if not rejected and run.manager.is_done(finished.claim):
        run.results[finished.claim.place] = finished


def _worth_keeping(recorded: list[RecordedTurn]) -> list[RecordedTurn]:
    """Turns whose request may come again: who extended an answer has got it, and of equal requests only the
    last one may still lack its answer."""
    open_ended = [r for r in recorded if r.turn is None or not r.turn.has_continuation]
    latest = {r.identity: r for r in open_ended if r.turn is not None}
    return [r for r in open_ended if r.turn is None or latest[r.identity] is r]


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
    head = [run_record(run.spec.model_copy(update=spec)), *map(revoked_record, sorted(run.revoked_leases))]

    def keep(record: Record) -> bool:
        match kind_of(record):
            case "run" | "weights" | "revoked" | "closed":
                return False
            case "evaluation":
                return bool(record["evaluation"][0] >= newest_evaluation)
            case "sealed":
                return bool(record["sealed"] == last)
            case "begun" | "chunk" | "turn" | "delivered" as kind:
                return record[kind][0] in sessions
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
