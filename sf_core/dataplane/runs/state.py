"""What survives a restart of a run: its groups, results and open sessions, its weights and pauses.

A value: `apply` alone changes it, with one event of the run at a time, when that happens and again after a
restart. Beside these facts it has what helps to serve them and is not recorded: the clock of sessions, the
queues of answers, and statistics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from sf_core.config.rollout_config import REASONS
from sf_core.dataplane.api_schemas import RewardBody, RunSpec
from sf_core.dataplane.journal.journal import Compaction
from sf_core.dataplane.runs import events
from sf_core.dataplane.runs.events import RunEvent
from sf_core.dataplane.runs.groups import Group
from sf_core.dataplane.runs.ledger import Batch, Ledger
from sf_core.dataplane.runs.results import Dropped, Ends, RecentResults, Results, result_of
from sf_core.dataplane.runs.runners import Scoring
from sf_core.dataplane.sessions.claims import Claim, ExternalMode, SessionSlot
from sf_core.dataplane.sessions.finished import FinishedSession, Spent, count_discarded
from sf_core.dataplane.sessions.memory_budget import MemoryBudget
from sf_core.dataplane.sessions.session import Session
from sf_core.dataplane.sessions.turn_events import OfTurn, Overflowed, Sampled, TurnEnded, TurnEvent
from sf_core.types import WeightsRef
from storage.tables.judgements import Judgement
from storage.tables.schema import Trajectory


class RunState:
    def __init__(self, spec: RunSpec, memory: MemoryBudget) -> None:
        """A run with the progress that `spec` states."""
        self.spec = spec
        self.memory = memory
        self.weights = WeightsRef(spec.version, spec.weights_uri)
        self.ledger = Ledger(
            spec.rollout,
            spec.lag_bound,
            spec.num_batches,
            next_batch=spec.iteration,
            version=spec.version,
            done_groups=spec.done_groups,
            first_attempt=spec.first_attempt,
            seed=spec.seed,
        )
        self.sessions: dict[str, Session] = {}
        self.results = Results(memory)
        self.ends = Ends()
        self.answers: dict[int, dict[str, Any]] = {}
        """Answers to the last seals, by batch, to be repeated on request."""
        self.revoked_leases: set[str] = set()
        self.paused: set[str | None] = set()
        """Paused engines; None: the run."""
        self.released = False
        """The run is over, unless another attempt of its flow goes on with it."""
        self.serving_s = 0.0
        """Seconds in which an engine served and turns were recorded: the clock of session timeouts."""
        self.scoring = Scoring()
        self.recent = RecentResults()
        self.spent = Spent()
        self.counters: Counter[str] = Counter()

    def apply(self, event: RunEvent) -> list[Dropped]:
        """Do what an event does. Returns the sessions that end by it, beside the one that it is about."""
        sessions = self.sessions
        ledger = self.ledger
        match event:
            case events.Registered(spec):
                self._register(spec)
            case events.Published(weights):
                self.weights = weights
            case events.EvaluationStarted(version, num_tasks):
                ledger.start_evaluation(version, num_tasks)
            case events.Admitted(group, pick, version):
                ledger.begin(group, pick, version)
            case events.Opened():
                self._open(event)
            case events.Rewarded(session_id, reward, parts, steps) if session_id in sessions:
                earned = RewardBody(reward=reward, reward_parts=parts, step_rewards=steps)
                sessions[session_id].earned = earned
                self.memory.update(sessions[session_id])
            case events.Named(session_id) if session_id in sessions:
                self._name(sessions[session_id], event)
            case events.Answered(session_id) if session_id in sessions:
                self._answer(sessions[session_id], event)
            case events.Unjudged(session_id) if session_id in sessions:
                self._score_again(sessions[session_id], event)
            case events.Closed(session_id, report):
                self.forget(session_id)
                self.ends.note(session_id, None, report)
            case events.Finished(result):
                return self._finish(result)
            case events.Failed(claim, reason, error, report):
                self.forget(claim.session_id(self.spec.run_id))
                self.ends.note(claim.session_id(self.spec.run_id), claim, report)
                self.recent.note_failed(error, claim)
                if claim.slot.split == "train":
                    self.recent.discarded[reason] += 1
                ledger.fail(claim, reason)
                return self._end_surplus(claim)
            case events.Lost(claim):
                self.forget(claim.session_id(self.spec.run_id))
                ledger.lose(claim)
            case events.Rejected(group, reason):
                ledger.reject(group, reason)
                return self._drop_group(group)
            case events.Sealed(index, batch, answer):
                ledger.seal(index, batch)
                self.answers[index] = answer
                self.answers.pop(index - 2, None)
                self.spent.clear()
                self.recent.discarded -= Counter(answer.get("discarded", {}))
                for group in (*batch.groups, *batch.rejected):
                    self.ends.drop("train", group)
                for group in batch.groups:
                    self._drop_results(group)
                return [dropped for group in batch.rejected for dropped in self._drop_group(group)]
            case events.Stored(session_ids):
                self.results.drop_external(session_ids)
            case events.Revoked(lease_id):
                self.revoked_leases.add(lease_id)
            case events.Paused(engine_id):
                self.paused.add(engine_id)
            case events.Resumed(engine_id):
                self.paused.discard(engine_id)
            case events.Released():
                self.released = True
                return [self._drop(session, "the run was released") for session in list(sessions.values())]
            case OfTurn() | Overflowed():
                self._take_turn(event)
        return []

    # --- questions

    def counts(self, session: Session) -> bool:
        """Whether the session is of a group that a batch or an evaluation may take."""
        return session.claim is not None and self.ledger.group_of(session.claim) is not None

    def mode_of(self, session: Session) -> ExternalMode | None:
        """How the session counts if it is external; None if a runner was given it."""
        if not session.is_external:
            return None
        return "group" if self.counts(session) else "log"

    def judges(self, session: Session) -> bool:
        """Whether its answer is scored together with those of its group."""
        is_training = session.claim is not None and session.claim.slot.split == "train"
        return self.spec.judges_groups and is_training and not session.is_external

    def sessions_of(self, split: str, group: int) -> list[Session]:
        """The open sessions of a group, in order of their places."""
        sessions = [s for s in self.sessions.values() if s.claim and s.claim.slot[:2] == (split, group)]
        return sorted(sessions, key=lambda session: session.claim or ())

    def slots_of(self, group: int) -> list[SessionSlot]:
        """Places of a training group that have a result."""
        slots = (SessionSlot("train", group, member) for member in range(self.ledger.largest_group))
        return [slot for slot in slots if slot in self.results.by_slot]

    def results_of(self, groups: Iterable[int]) -> list[FinishedSession]:
        """Results of these groups, in order."""
        return [self.results.by_slot[slot] for group in groups for slot in self.slots_of(group)]

    def tasks_of(self, group: Group) -> set[tuple[str, str]]:
        """Id and environment of each task that sessions of a group have named."""
        named: list[Session | Trajectory] = []
        for index, member in enumerate(group.members):
            claim = Claim(SessionSlot(group.split, group.index, index), member.attempt)
            if session := self.sessions.get(claim.session_id(self.spec.run_id)):
                named.append(session)
            if result := self.results.by_slot.get(claim.slot):
                named += result.trajectories[:1]
        return {(rows.task_id, rows.environment) for rows in named if rows.task_id}

    def list_answered(self, group: Group) -> list[Session]:
        """Sessions of a group that have answered and are not scored yet, in order of their places."""
        sessions = self.sessions_of(group.split, group.index)
        return [session for session in sessions if session.answer is not None and self.counts(session)]

    def is_half_judged(self, group: Group) -> bool:
        """Whether some answers of a group were scored and another one will not be with them."""
        if not (self.spec.judges_groups and group.is_half_judged):
            return False
        return sum(not session.waits_for_group for session in self.list_answered(group)) < group.num_left

    # --- what events do

    def forget(self, session_id: str) -> None:
        if (session := self.sessions.pop(session_id, None)) is not None:
            self.memory.remove(session)

    def close_evaluation(self, version: int) -> None:
        """Forget the results of an evaluation that is written, and earlier ones. After a restart the journal
        has those of the last one."""
        self.ends.drop("holdout", version)
        evaluations = self.ledger.evaluations
        self.ledger.evaluations = {v: group for v, group in evaluations.items() if v >= version}
        self.results.drop_evaluations(version)

    def start_over(self) -> RunState:
        """A run with the progress that the flow states, and none of its groups. What external agents do and
        have done goes on, and so do leases and pauses; evaluations up to this version are kept."""
        fresh = RunState(self.spec, self.memory)
        self.results.drop_groups()
        evaluations = self.ledger.evaluations.items()
        fresh.ledger.evaluations = {v: group for v, group in evaluations if v <= self.spec.version}
        fresh.sessions = self.sessions
        fresh.results = self.results
        fresh.scoring = self.scoring
        fresh.revoked_leases = self.revoked_leases
        fresh.paused = self.paused
        fresh.serving_s = self.serving_s
        fresh.recent = self.recent
        fresh.counters = self.counters
        return fresh

    def free_memory(self) -> None:
        """Free the memory of all sessions and results."""
        for session_id in list(self.sessions):
            self.forget(session_id)
        self.results.drop_all()

    def queue_group(self, claim: Claim | None) -> None:
        """Queue the answers of the group of this session, if all of them are there and are scored
        together."""
        group = self.ledger.train_group_of(claim)
        if self.spec.judges_groups and group is not None:
            self.scoring.queue_group(group, self.list_answered(group), self.serving_s)

    def _register(self, spec: RunSpec) -> None:
        if spec.attempt > self.spec.attempt:
            self.recent.forget_failures()
            self.ledger.forget_dropped()
        self.spec = spec
        self.released = False
        self.ledger.set_rules(spec.rollout, spec.lag_bound, spec.num_batches)
        if spec.version > self.weights.version:
            self.weights = WeightsRef(spec.version, spec.weights_uri)
        self.ledger.set_version(spec.version)

    def _open(self, event: events.Opened) -> None:
        for session in event.sessions():
            claim = session.claim
            if claim is not None and claim.is_external and claim.slot.split == "train":
                self.ledger.declare(claim.slot.group, len(event.facts))
            if claim is None or self.ledger.open(claim) or claim.is_external:
                if session.is_external or not self.spec.rollout.prepare_ahead:
                    session.began_at = self.serving_s
                if claim is not None and claim.slot.split == "holdout":
                    session.floor = claim.slot.group
                self.sessions[session.session_id] = session
                self.memory.add(session)

    def _name(self, session: Session, event: events.Named) -> None:
        session.task_id = event.task_id
        session.environment = event.environment
        # an answer that came before this waits for others of its group
        if session.answer is None and session.began_at > self.serving_s:
            session.began_at = self.serving_s

    def _answer(self, session: Session, event: events.Answered) -> None:
        session.answer = event.answer
        session.output = event.output
        session.began_at = self.serving_s
        self.memory.update(session)
        if self.judges(session):
            self.scoring.hold_back(session)
            self.queue_group(session.claim)
        elif not session.is_external:
            self.scoring.queue(session)

    def _score_again(self, session: Session, event: events.Unjudged) -> None:
        self.counters["unjudged"] += 1
        self.recent.last_error = event.error
        session.judgements += event.judgements
        self.memory.update(session)
        self.note_judgements(event.judgements)
        group = self.ledger.train_group_of(session.claim)
        if not self.judges(session) or group is None:
            session.num_unjudged += 1
            session.began_at = self.serving_s
            self.scoring.queue(session)
            return
        # what one of them says holds for all, which were scored together
        for answered in self.list_answered(group):
            answered.num_unjudged += 1
            self.scoring.hold_back(answered)
        self.queue_group(session.claim)

    def note_judgements(self, judgements: Sequence[Judgement]) -> None:
        """Count what judges were asked: their tokens, and replies that were no verdicts."""
        self.spent.add(judgements)
        for reason, number in count_discarded(judgements).items():
            self.counters[f"discarded_replies.{reason}"] += number

    def _finish(self, result: FinishedSession) -> list[Dropped]:
        session = self.sessions.get(result.session_id)
        # those of before were counted then
        self.note_judgements(result.judgements[len(session.judgements) if session else 0 :])
        self.forget(result.session_id)
        self.ends.note(result.session_id, result.claim, result.report)
        if (claim := result.claim) is None:
            self.results.add_external(result)
            return []
        self._note_outcome(result, claim)
        counted = result_of(result, self.spec.rollout.success)
        self.ledger.finish(claim, counted, result.min_version)
        if self.ledger.is_done(claim):
            self.results.add(claim.slot, result)
        elif claim.is_external:
            self._keep_untrained(result)
        return self._end_surplus(claim)

    def _note_outcome(self, result: FinishedSession, claim: Claim) -> None:
        rules = self.spec.rollout.on_failure
        # the last attempt at a held-out task counts, but shows no working agent
        if result.status in REASONS and rules.rule_for(result.status) == "retry_then_exclude":
            self.recent.note_failed(result.error, claim)
        else:
            self.recent.note_finished(result, claim)

    def _end_surplus(self, claim: Claim) -> list[Dropped]:
        """End the sessions without which the group of this one is complete, and queue its answers if they are
        to be scored."""
        self.queue_group(claim)
        group = self.ledger.train_group_of(claim)
        if group is None or not group.is_complete or group.num_done == group.size:
            return []
        surplus = self.sessions_of("train", group.index)
        for session in surplus:
            self.results.cut.setdefault(group.index, []).append(session.num_sampled)
        reason = "the group of this session is complete without it"
        return [self._drop(session, reason) for session in surplus]

    def _drop_group(self, index: int) -> list[Dropped]:
        """Forget a group that does not count. Its sessions end; those of external agents go on by themselves,
        and what they have earned is stored as that of external sessions."""
        for result in self._drop_results(index):
            if result.claim is not None and result.claim.is_external:
                self._keep_untrained(result)
        reason = "the group of this session no longer counts"
        sessions = self.sessions_of("train", index)
        return [self._drop(session, reason) for session in sessions if not session.is_external]

    def _drop_results(self, index: int) -> list[FinishedSession]:
        """Forget the results of a group; returns them."""
        self.results.cut.pop(index, None)
        dropped = [self.results.drop(slot) for slot in self.slots_of(index)]
        return [result for result in dropped if result is not None]

    def _keep_untrained(self, result: FinishedSession) -> None:
        """Keep the result of a session whose agent came by itself and whose group does not count."""
        self.results.add_external(result)
        self.counters["untrained_sessions"] += 1

    def _drop(self, session: Session, reason: str) -> Dropped:
        self.forget(session.session_id)
        return Dropped(session, reason)

    def _take_turn(self, event: TurnEvent) -> None:
        if (session := self.sessions.get(event.session_id)) is None:
            return  # it is over
        versions = event.tokens.versions if isinstance(event, Sampled | TurnEnded) else ()
        if len(versions) and session.claim is not None:
            self.ledger.note_started(session.claim, int(min(versions)))
        session.apply(event)
        self.memory.update(session)

    # --- compaction

    def snapshot(self) -> Compaction[RunEvent]:
        """What a compacted journal has: events that lead to this state, and which of the old ones follow
        them. The results of the last sealed batch and evaluation stay too, because their flow may not have
        committed them."""
        ledger = self.ledger
        last = ledger.next_batch - 1
        batch = ledger.batches.get(last, Batch([], {}))
        iteration = last if last in ledger.batches else ledger.next_batch
        progress = {
            "iteration": iteration,
            "version": self.weights.version,
            "weights_uri": self.weights.uri,
            "done_groups": ledger.list_done_before(iteration),
        }
        head: list[RunEvent] = [events.Registered(self.spec.model_copy(update=progress))]
        ended = [*ledger.ended_by.get(last, ()), *ledger.ended]
        head += [events.Admitted(group.group, group.pick, group.version) for group in ended if group.pick]
        groups = ledger.groups.values()
        head += [events.Admitted(group.index, group.pick, group.version) for group in groups if group.pick]
        head += map(events.Revoked, sorted(self.revoked_leases))
        head += map(events.Paused, sorted(self.paused, key=str))
        sessions = set(self.sessions)
        unstored = set(self.results.external)
        indices = {*batch.groups, *batch.rejected, *ledger.groups, *ledger.rejected}
        newest = max(ledger.evaluations, default=0)
        needed = events.Needed(self.spec, self.released, sessions, unstored, indices, newest, last)
        return head, needed.keeper()
