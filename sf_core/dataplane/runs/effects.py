"""What every event of a run's journal does to the run, when it happens and again after a restart, and which
events a restart needs.

Owns the effects on groups, runners, results and router; those of registrations are in recovery.py, those of
turns in turns/live_turn.py. Three decisions take effect before their event is recorded: claims
(RolloutManager.claim), the choice of a batch (RolloutManager.seal) and published weights (DataPlane.publish).
Their effects here are for restarts alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sf_core.config.failures import REASONS
from sf_core.dataplane.bodies import RewardBody
from sf_core.dataplane.journal.journal import Compaction
from sf_core.dataplane.runs import events
from sf_core.dataplane.runs.events import RunEvent
from sf_core.dataplane.runs.results import result_of
from sf_core.dataplane.runs.rollout_manager import Batch
from sf_core.dataplane.sessions.claims import Claim
from sf_core.dataplane.sessions.finished import FinishedSession
from sf_core.dataplane.sessions.session import Session
from sf_core.dataplane.sessions.turn_events import OfTurn, Overflowed

if TYPE_CHECKING:
    from sf_core.dataplane.runs.run import ServedRun


class Effects:
    def __init__(self, run: ServedRun) -> None:
        self._run = run

    def apply(self, event: RunEvent) -> list[int]:
        """Do what an event does; returns the groups that are rejected by it."""
        run, sessions = self._run, self._run.sessions
        match event:
            case events.Published(weights):
                run.router.weights = weights
                run.manager.set_version(weights.version)
            case events.EvaluationStarted(version, num_tasks):
                run.manager.start_evaluation(version, num_tasks)
            case events.Opened():
                for session in event.sessions():
                    claim = session.claim
                    if claim is not None and claim.is_outside and claim.place.split == "train":
                        run.manager.restore_declared(claim.place.group, len(event.facts))
                    if claim is None or run.manager.restore_running(claim) or claim.is_outside:
                        run.open(session)
            case events.Rewarded(session_id, reward, parts, steps) if session_id in sessions:
                earned = RewardBody(reward=reward, reward_parts=parts, step_rewards=steps)
                sessions[session_id].earned = earned
            case events.Named(session_id) if session_id in sessions:
                named = sessions[session_id]
                named.task_id, named.environment = event.task_id, event.environment
                # an answer that came before this waits for others of its group
                if named.answer is None and named.began_at > run.serving_s:
                    named.began_at = run.serving_s
            case events.Answered(session_id) if session_id in sessions:
                sessions[session_id].output = event.output
                self._note_answer(sessions[session_id], event.answer)
            case events.Closed(session_id):
                run.forget(session_id)
            case events.Finished(result):
                return self._drop_groups(self._finish(result))
            case events.Failed(claim, reason, error):
                self._forget(claim)
                run.outcomes.note_failed(error)
                if claim.place.split == "train":
                    run.outcomes.discarded[reason] += 1
                rejected = run.manager.fail(claim, reason)
                self._end_surplus(claim)
                return self._drop_groups(rejected + run.judging.proceed(claim))
            case events.Lost(claim):
                self._forget(claim)
                run.manager.lose(claim)
            case events.Admitted(group, pick, version):
                run.manager.restore_admitted(group, pick, version)
            case events.Rejected(group, reason):
                run.manager.restore_rejected(group, reason)
                self._drop_group(group)
            case events.Sealed(index, batch, answer):
                run.manager.restore_sealed(index, batch)
                run.answers[index] = answer
                run.outcomes.forget_discarded(answer)
                self._drop_groups([*batch.rejected])
                for group in batch.groups:
                    self.drop_results(group)
            case events.Stored(session_ids):
                run.results.drop_opened(session_ids)
            case events.Revoked(lease_id):
                run.revoked_leases.add(lease_id)
            case events.Paused(engine_id):
                run.router.note_paused(engine_id)
            case events.Resumed(engine_id):
                run.router.resume(engine_id)
            case events.Released():
                run.release()
            case OfTurn() | Overflowed():
                run.turns.recover(event)
        return []

    def _drop_group(self, index: int) -> None:
        """Forget a group that does not count. Its sessions end; those of agents outside go on by themselves,
        and what they have earned is stored as that of external sessions."""
        run = self._run
        run.results.cut.pop(index, None)
        for session in [s for s in run.sessions.values() if not s.is_external]:
            if session.claim is not None and session.claim.place[:2] == ("train", index):
                run.drop(session, "the group of this session no longer counts")
        for place in run.places_of(index):
            result = run.results.drop(place)
            if result is not None and result.claim is not None and result.claim.is_outside:
                self._keep_untrained(result)

    def drop_results(self, index: int) -> None:
        """Forget the results of a group that a batch has taken."""
        self._run.results.cut.pop(index, None)
        for place in self._run.places_of(index):
            self._run.results.drop(place)

    def _keep_untrained(self, result: FinishedSession) -> None:
        """Keep the result of a session whose agent came by itself and whose group does not count."""
        self._run.results.keep_opened(result)
        self._run.count("untrained_sessions")

    def _note_answer(self, session: Session, answer: str) -> None:
        session.answer = answer
        session.began_at = self._run.serving_s
        if self._run.judging.includes(session):
            self._run.judging.add(session)
        elif not session.is_external:
            self._run.runners.await_reward(session)

    def _finish(self, result: FinishedSession) -> list[int]:
        run, claim = self._run, result.claim
        run.forget(result.session_id)
        if claim is None:
            run.results.keep_opened(result)
            return []
        self._note_outcome(result)
        told = result_of(result, run.spec.rollout.success)
        rejected = run.manager.restore_finished(claim, told, result.min_version)
        self._end_surplus(claim)
        rejected += run.judging.proceed(claim)
        if not rejected and run.manager.is_done(claim):
            run.results.keep(claim.place, result)
        elif claim.is_outside:
            self._keep_untrained(result)
        return rejected

    def _end_surplus(self, claim: Claim) -> None:
        """End the sessions without which the group of this one is complete."""
        run = self._run
        group = run.manager.groups.get(claim.place.group) if claim.place.split == "train" else None
        if group is None or not group.is_complete or group.num_done == group.size:
            return
        for session in [s for s in run.sessions.values() if s.claim and s.claim.place[:2] == claim.place[:2]]:
            run.results.cut.setdefault(group.index, []).append(session.num_sampled)
            run.count("surplus_tokens", session.num_sampled)
            run.drop(session, "the group of this session is complete without it")
            run.count("surplus_sessions")

    def _note_outcome(self, result: FinishedSession) -> None:
        outcomes, rules = self._run.outcomes, self._run.spec.rollout.on_failure
        # the last attempt at a held-out task counts, but shows no working agent
        if result.status in REASONS and rules.rule_for(result.status) == "retry_then_exclude":
            outcomes.note_failed(result.error)
        else:
            outcomes.note_finished(result)

    def _drop_groups(self, indices: list[int]) -> list[int]:
        for index in indices:
            self._drop_group(index)
        return indices

    def _forget(self, claim: Claim) -> None:
        self._run.forget(claim.session_id(self._run.spec.run_id))


def compaction(run: ServedRun) -> Compaction[RunEvent]:
    """All that a restart could need now, with the last sealed batch: its flow may not have committed it."""
    manager, weights = run.manager, run.router.weights
    last = manager.next_batch - 1
    batch = manager.batches.get(last, Batch([], {}))
    iteration = last if last in manager.batches else manager.next_batch
    groups = {*batch.groups, *batch.rejected, *manager.groups, *manager.rejected}
    newest_evaluation = max(manager.evaluations, default=0)
    sessions, unstored, is_released = run.unfinished, set(run.results.opened), run.released
    progress = {
        "iteration": iteration,
        "version": weights.version,
        "weights_uri": weights.uri,
        "done_groups": manager.done_before(iteration),
    }
    head: list[RunEvent] = [events.Registered(run.spec.model_copy(update=progress))]
    head += map(events.Revoked, sorted(run.revoked_leases))
    head += map(events.Paused, [*([None] if run.router.paused else []), *sorted(run.router.paused_engines)])

    reopened: set[str] = set()
    """Sessions of agents outside that a restart opens: what ended them must be kept."""

    def counts(claim: Claim | None) -> bool:
        if claim is None:
            return False
        split, group, _ = claim.place
        return group in groups if split == "train" else group >= newest_evaluation

    is_ours = True
    """Whether the event is of the run that is served, and not of one that it replaced (begin_anew)."""

    def keep(event: RunEvent) -> bool:
        nonlocal is_ours
        match event:
            case events.Registered(spec):
                is_ours = spec.origin == run.spec.origin
                return False  # the head has what it led to
            case events.Published():
                return False  # likewise
            case events.Finished(result) if not is_ours:
                return result.session_id in unstored
            case events.Stored(session_ids) if not is_ours:
                return not unstored.isdisjoint(session_ids)
            case _ if not is_ours:
                return False
            case events.Revoked() | events.Paused() | events.Resumed():
                return False  # the head has those that still count
            case events.EvaluationStarted(version):
                return version >= newest_evaluation
            case events.Opened(opened):
                is_kept = any(one.session_id in sessions or counts(one.claim) for one in opened)
                external = [one for one in opened if one.claim is None or one.claim.is_outside]
                reopened.update(one.session_id for one in external if is_kept)
                return is_kept
            case events.Closed(session_id):
                return session_id in reopened
            case events.Finished(result) if result.claim is None or result.claim.is_outside:
                return result.session_id in reopened or result.session_id in unstored
            case events.Finished(result):
                return counts(result.claim)
            case events.Failed(claim) | events.Lost(claim):
                return counts(claim) or claim.session_id(run.spec.run_id) in reopened
            case events.Rejected(group) | events.Admitted(group):
                return group in groups
            case events.Sealed(index):
                return index == last
            case events.Stored(session_ids):
                return not reopened.union(unstored).isdisjoint(session_ids)
            case events.Released():
                return is_released
        return event.session_id in sessions

    return head, keep
