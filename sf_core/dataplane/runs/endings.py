"""How the sessions of a run end: a report becomes a result, a retry, or a rejected group.

A session never blocks its batch: if closing or exporting it fails, its slot is reopened or its group rejected
with the reason. The rollout manager says what a failure is worth."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sf_core.config import RolloutConfig
from sf_core.config.failures import REASONS, failures_text
from sf_core.dataplane.bodies import FinishBody, RewardBody
from sf_core.dataplane.errors import RETRY_AFTER_S, ApiError
from sf_core.dataplane.runs.events import Answered, Closed, Failed, Finished
from sf_core.dataplane.runs.groups import Group
from sf_core.dataplane.sessions.claims import Claim, SessionSlot
from sf_core.dataplane.sessions.finished import FinishedSession
from sf_core.dataplane.sessions.session import Session
from sf_core.recipes.gates import GATE_REASONS

if TYPE_CHECKING:
    from sf_core.dataplane.runs.run import ServedRun

log = logging.getLogger(__name__)

MAX_DROPPED_BATCHES = 10
"""Batches whose groups may all be dropped, one after the other, before the run ends."""

ALL_DROPPED = "all_dropped"
"""Why the groups are rejected that are in flight when it ends by that."""

NOT_JUDGED = "not_judged"
"""Why a group is rejected for which `environment.group_reward` gives no rewards."""


class Endings:
    def __init__(self, run: ServedRun) -> None:
        self._run = run

    async def end(self, session: Session, report: FinishBody) -> None:
        """End a session as reported; returns when the end is on disk. Raises ApiError, with `retry_after_s`
        if nothing has happened."""
        report = report.or_earlier(session.earned)
        claim = session.claim
        if session.is_external and report.status == "answered" and report.reward is not None:
            report = report.model_copy(update={"status": "finished"})
        if report.status == "answered":
            await self._await_reward(session, report.answer or "null", report.output)
        elif claim is None or (claim.is_outside and not self._run.counts(session)):
            await self._end_opened(session, report)
        elif report.status == "failed" and report.cause == "group":
            self._drop_judged(claim)
        elif report.status == "failed":
            await self._end_given(
                session, claim, self._failure(session, report, report.error or "no reason given")
            )
        elif refusal := fault_of(report, session) or self._lacks_part(report, claim):
            scored = report.model_copy(update={"cause": "reward"})
            await self._end_given(session, claim, self._failure(session, scored, refusal.message))
            raise refusal
        else:
            await self._end_given(session, claim, report)

    def refuse_other_task(self, session: Session) -> bool:
        """End the run if other sessions of the group are named after another task than this one: rewards
        are compared within a group. Returns whether that is so."""
        run, claim = self._run, session.claim
        if not session.task_id or claim is None or claim.is_outside or claim.place.split != "train":
            return False
        named = {(session.task_id, session.environment), *_tasks_of_group(run, claim.place)}
        if len(named) == 1:
            return False
        shown = " and ".join(f"{task_id!r} of {environment!r}" for task_id, environment in sorted(named)[:2])
        self.end_run_by(
            f"{run.spec.tasks} changes between two calls: sessions of group {claim.place.group}, which work "
            f"on one task, got {shown}. Equal arguments must give equal tasks, in every process",
            "task_changed",
            self._incomplete(),
        )
        return True

    def refuse_endless_drops(self) -> None:
        """End the run if nothing of what it has sampled for ten batches counts: it would go on for ever."""
        if fault := self.fault_of_drops():
            self.end_run_by(fault, ALL_DROPPED, self._incomplete())

    def _incomplete(self) -> list[Group]:
        """The run's own groups that are not complete."""
        return [g for g in self._run.manager.groups.values() if not (g.is_outside or g.is_complete)]

    def fault_of_drops(self) -> str:
        """What is to be said of a run whose groups were all dropped for ten batches; empty of any other."""
        counts = self._run.manager.dropped_in_a_row
        # those that ended with the run are no reason for its end
        dropped = {reason: counts[reason] for reason in counts if reason != ALL_DROPPED}
        total = sum(dropped.values())
        if total < MAX_DROPPED_BATCHES * self._run.spec.rollout.groups_per_batch:
            return ""
        if self._run.outcomes.failures_in_a_row >= total:
            # no session succeeds, which the wait for the batch ends with what the last one said
            return ""
        return (
            f"the last {total} groups were all dropped ({failures_text(dropped)}), so that no batch gets "
            f"full: {self._way_out(dropped)}"
        )

    def _way_out(self, dropped: Mapping[str, int]) -> str:
        """What to do when groups are dropped for these reasons."""
        most = max(dropped, key=lambda reason: dropped[reason])
        if most == NOT_JUDGED:
            return "environment.group_reward returns None for them; take larger groups, or other tasks"
        if most not in GATE_REASONS:
            return f"mend what fails, the last was {self._run.outcomes.last_error or 'not recorded'}"
        return (
            f"rollout.gate {self._run.spec.rollout.gate.kind} lets none pass; take tasks that the policy "
            "solves now and then, correct rollout.success, or set rollout.gate to all"
        )

    def end_run_by(self, fault: str, reason: str, groups: list[Group]) -> None:
        """Have the flow end with this sentence, and reject the groups that it is about: an attempt in which
        it is mended begins new ones."""
        run = self._run
        run.fault = run.fault or fault
        run.counters[f"rejected_groups.{reason}"] += len(run.reject_all(groups, reason))
        run.changed.notify()

    async def expire(self, session: Session) -> None:
        """End a session whose time is over."""
        limit = f"{time_of(session, self._run.spec.rollout):g} s"
        error, cause = f"ran longer than {limit}", "time"
        if session.answer is not None:
            error, cause = f"got no reward within {limit} of its answer", "reward"
        report = FinishBody.model_validate({"status": "failed", "cause": cause, "error": error})
        try:
            await self._run.finish(session, report)
        except Exception as raised:
            log.warning("run %s: a session that %s: %s", self._run.spec.run_id, error, raised)

    def _drop_judged(self, claim: Claim) -> None:
        """Drop the group of a session, as its judge says."""
        run = self._run
        group = run.manager.groups.get(claim.place.group) if claim.place.split == "train" else None
        rejected = run.reject_all([group] if group is not None else [], NOT_JUDGED)
        run.count(f"rejected_groups.{NOT_JUDGED}", len(rejected))
        self.refuse_endless_drops()
        run.changed.notify()

    def _lacks_part(self, report: FinishBody, claim: Claim) -> ApiError | None:
        """The reward of a training session without the part that says whether it was right."""
        success = self._run.spec.rollout.success
        if success is None or success.part is None or claim.place.split == "holdout":
            return None
        given = sorted(name for name, value in report.reward_parts.items() if value is not None)
        if success.part in given:
            return None
        way_out = f"it has {', '.join(map(repr, given))}: name one of them there, or return that part"
        if not given:
            way_out = "it has no parts: return a mapping of them, or remove rollout.success.part"
        sentence = f"The reward has no part {success.part!r}, which rollout.success.part names; {way_out}."
        return ApiError(400, sentence, param="reward_parts")

    def _failure(self, session: Session, report: FinishBody, error: str) -> FinishBody:
        cause = report.cause if session.answer is None else "reward"
        return report.of_failure(error, cause, self._run.spec.rollout.failed_reward)

    async def _await_reward(self, session: Session, answer: str, output: str | None) -> None:
        run = self._run
        if session.answer is None:
            session.answer = answer  # at once: from now on it is not lost with its runner
            event = Answered(session.session_id, answer, output)
            await run.journal.append(event)
            run.effects.apply(event)
            run.changed.notify()

    async def _end_opened(self, session: Session, report: FinishBody) -> None:
        """End an external session. If it failed it leaves nothing; without a reward it stays open."""
        run = self._run
        run.journal.check()
        if report.status == "failed":
            run.drop(session, report.parting)
            return await run.journal.append(Closed(session.session_id))
        if refusal := fault_of(report, session):
            raise refusal
        try:
            result = run.take_out(session, report)
            if not result.trajectories:
                return await run.journal.append(Closed(session.session_id))
            await run.journal.append(Finished(result))
        except Exception as error:
            await run.journal.append(Closed(session.session_id))
            raise _refusal(session, error) from error
        run.effects.apply(Finished(result))
        run.counters["opened_sessions"] += 1

    async def _end_given(self, session: Session, claim: Claim, report: FinishBody) -> None:
        """End a session that a runner was given; the report has a reward, also that of a failure."""
        report = report.model_copy(
            update={
                "task_id": report.task_id or session.task_id,
                "environment": report.environment or session.environment,
                "output": session.output if report.output is None else report.output,
            }
        )
        session.task_id, session.environment = report.task_id, report.environment
        if self.refuse_other_task(session):
            return
        try:
            return await self._settle(claim, self._run.take_out(session, report), report.error or "")
        except Exception as error:  # whatever it is must not cost the place
            refusal = _refusal(session, error)
        if refusal.retry_after_s is not None:
            raise refusal
        if self._run.manager.group_of(claim) is not None:
            await self._give_up(claim, report, refusal.message)
        raise refusal

    async def _give_up(self, claim: Claim, report: FinishBody, error: str) -> None:
        """Settle a session of which nothing could be recorded, because nothing else would end it."""
        run = self._run
        session_id, reward = claim.session_id(run.spec.run_id), run.spec.rollout.failed_reward
        nothing = FinishedSession(
            session_id, claim, reward, report.environment, None, None, [], "not_recorded"
        )
        await self._settle(claim, nothing, error)

    async def _settle(self, claim: Claim, result: FinishedSession, error: str) -> None:
        """Count a result or its failure; `error` is the reason of a failure."""
        if claim.place.split == "train" and not result.trajectories and result.status not in REASONS:
            has_overflowed = result.status == "finished_after_overflow"
            result.status = "context_overflow" if has_overflowed else "agent_error"
            error = "the agent finished without an answer from the policy"
        if result.status in REASONS:
            await self._settle_failure(claim, result, error)
        else:
            self._run.counters["finished_sessions"] += 1
            await self._keep(claim, result)
        self._run.changed.notify()

    async def _settle_failure(self, claim: Claim, result: FinishedSession, error: str) -> None:
        run, reason = self._run, result.status
        assert reason in REASONS
        run.counters["failed_sessions"] += 1
        run.counters[f"failures.{reason}"] += 1
        result.error = error
        worth = run.manager.worth(claim, reason, can_train=result.min_version is not None)
        if worth is not None:
            return await self._keep(claim, result)
        failed = Failed(claim, reason, error)
        await run.journal.append(failed)
        await run.reject(run.effects.apply(failed))

    async def _keep(self, claim: Claim, result: FinishedSession) -> None:
        run = self._run
        await run.journal.append(Finished(result))
        if run.manager.group_of(claim) is not None or claim.is_outside:
            await run.reject(run.effects.apply(Finished(result)))


def _tasks_of_group(run: ServedRun, place: SessionSlot) -> Iterator[tuple[str, str]]:
    """Id and environment of each task that a session of this group has named."""
    group = run.manager.groups.get(place.group)
    for index, member in enumerate(group.members if group is not None else ()):
        other = Claim(place._replace(member=index), member.attempt)
        session_id = other.session_id(run.spec.run_id)
        session = run.sessions.get(session_id) or run.closing.get(session_id)
        result = run.results.by_place.get(other.place)
        for named in (session, *(result.trajectories[:1] if result is not None else ())):
            if named is not None and named.task_id:
                yield named.task_id, named.environment


def _refusal(session: Session, error: Exception) -> ApiError:
    """The error with which the report of an end is answered."""
    if isinstance(error, ApiError):
        return error
    log.error("session %s could not be recorded", session.session_id, exc_info=error)
    told = f"{type(error).__name__}: {error}"
    return ApiError(500, f"Session {session.session_id} could not be recorded: {told}.")


def fault_of(report: FinishBody | RewardBody, session: Session) -> ApiError | None:
    """What is wrong with the reward that a session is given."""
    if isinstance(report, FinishBody) and not report.has_reward:
        return ApiError(400, "A finished session needs a reward that is a finite number.", param="reward")
    for answer in report.step_rewards:
        if session.turn_named(answer) is None:
            sentence = f"step_rewards names {answer!r}, which is the id of no answer of this session."
            return ApiError(400, sentence, param="step_rewards")
    return None


def time_of(session: Session, rules: RolloutConfig) -> float:
    """Longest time of a session, in seconds: until its agent has answered, or from then until its reward."""
    if session.answer is None:
        return rules.session_timeout_s
    return rules.reward_patience_s if session.is_external else rules.score_timeout_s


class Closing(dict[str, Session]):
    """Sessions whose end is being recorded, by id."""

    def check(self, session_id: str) -> None:
        """Raises ApiError 503 for such a session: a second report of its end must be told neither that the
        session is unknown nor that its end is recorded."""
        if session_id in self:
            raise ApiError(
                503,
                f"The end of session {session_id} is being recorded: send this again.",
                code="being_recorded",
                retry_after_s=RETRY_AFTER_S,
            )

    @contextmanager
    def holding(self, session: Session) -> Iterator[None]:
        """Contain a session while its end is recorded. Raises ApiError as `check` does."""
        self.check(session.session_id)
        self[session.session_id] = session
        try:
            yield
        finally:
            del self[session.session_id]
