"""How the sessions of a run end: a report becomes a result, a retry, or a rejected group.

A session never blocks its batch: if exporting it fails, it ends with that as its failure. What a failure is
worth is decided in decide.py.
"""

from __future__ import annotations

import asyncio
import logging

from sf_core.config import RolloutConfig
from sf_core.config.failures import REASONS
from sf_core.dataplane.bodies import FinishBody, RewardBody, RunSpec
from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.runs import decide
from sf_core.dataplane.runs.events import Answered, Closed, Failed, Finished, Rewarded
from sf_core.dataplane.runs.faults import (
    ALL_DROPPED,
    NOT_JUDGED,
    explain_drops,
    explain_other_task,
    list_incomplete,
)
from sf_core.dataplane.runs.ledger import Ledger
from sf_core.dataplane.runs.run import ServedRun
from sf_core.dataplane.sessions.claims import Claim
from sf_core.dataplane.sessions.finished import FinishedSession, finish_session
from sf_core.dataplane.sessions.session import Session

log = logging.getLogger(__name__)


async def reward(run: ServedRun, session: Session, body: RewardBody) -> None:
    """Note what a session has earned so far, which stays open. Raises ApiError 400."""
    if refusal := fault_of(body, session):
        raise refusal
    given = body.reward, body.reward_parts, body.step_rewards
    await run.record_now(Rewarded(session.session_id, *given))


async def finish(run: ServedRun, session: Session, report: FinishBody) -> None:
    """End a session as its agent or runner reports. Returns when the result is on disk. Raises ApiError
    503 while the result of an earlier report is not."""
    with run.closing.holding(session):
        if run.sessions.get(session.session_id) is not session:
            return  # it ended before this report came
        refusal = _end(run, session, report.or_earlier(session.earned))
        await run.journal.flush()
        run.changed.notify()
        if refusal is not None:
            raise refusal


def _end(run: ServedRun, session: Session, report: FinishBody) -> ApiError | None:
    """End a session as reported. Returns why the report is refused; raises that if nothing has happened."""
    claim = session.claim
    if session.is_external and report.status == "answered" and report.reward is not None:
        report = report.model_copy(update={"status": "finished"})
    if report.status == "answered":
        if session.answer is None:
            run.record(Answered(session.session_id, report.answer or "null", report.output))
        return None
    if claim is None or (claim.is_outside and not run.state.counts(session)):
        return _end_opened(run, session, report)
    if report.status == "failed" and report.cause == "group":
        _reject_judged(run, claim)
        return None
    rules = run.spec.rollout
    if report.status == "failed":
        error = report.error or "no reason given"
        return _end_given(run, session, claim, _describe_failure(report, session, rules, error))
    if refusal := fault_of(report, session) or _fault_of_parts(report, claim, run.spec):
        scored = report.model_copy(update={"cause": "reward"})
        _end_given(run, session, claim, _describe_failure(scored, session, rules, refusal.message))
        return refusal
    return _end_given(run, session, claim, report)


def _end_opened(run: ServedRun, session: Session, report: FinishBody) -> ApiError | None:
    """End an external session. If it failed it leaves nothing; without a reward it stays open."""
    run.journal.check()
    closed = Closed(session.session_id)
    if report.status == "failed":
        run.part(session, report.parting)
        run.record(closed)
        return None
    if refusal := fault_of(report, session):
        raise refusal
    try:
        result = _take_out(run, session, report)
    except Exception as error:
        run.record(closed)
        return _refuse_unrecorded(session, error)
    if not result.trajectories:
        run.record(closed)
        return None
    run.record(Finished(result))
    run.counters["opened_sessions"] += 1
    return None


def _end_given(run: ServedRun, session: Session, claim: Claim, report: FinishBody) -> ApiError | None:
    """End a session that a runner was given; the report has a reward, also that of a failure."""
    report = _complete_report(report, session)
    session.task_id, session.environment = report.task_id, report.environment
    if refuse_other_task(run, session):
        return None
    refusal, error = None, report.error or ""
    try:
        result = _take_out(run, session, report)
    except Exception as raised:  # whatever it is must not cost the place
        refusal = _refuse_unrecorded(session, raised)
        error, earned = refusal.message, run.spec.rollout.failed_reward
        result = FinishedSession(
            session.session_id, claim, earned, report.environment, None, None, [], "not_recorded"
        )
    ended = _decide_end(run.state.ledger, claim, result, error)
    if result.status in REASONS:
        run.counters["failed_sessions"] += 1
        run.counters[f"failures.{result.status}"] += 1
    else:
        run.counters["finished_sessions"] += 1
    run.record(ended)
    _judge(run, claim)
    return refusal


def _take_out(run: ServedRun, session: Session, report: FinishBody) -> FinishedSession:
    """Stop serving a session and return its result. Raises whatever its export raises."""
    run.part(session, report.parting)
    run.turns.set_aside_unanswered(session)
    return finish_session(run.spec, session, report, run.renderer.stop_token_ids)


def _judge(run: ServedRun, claim: Claim) -> None:
    """Reject the group of a session that has ended, if it does not count; else count what it did not need."""
    if (group := run.state.ledger.train_group_of(claim)) is None:
        return
    half = "half_judged" if run.state.is_half_judged(group) else ""
    if reason := decide.judge(run.state.ledger, group) or half:
        run.reject([group.index], reason)
        refuse_endless_drops(run)
    elif cut := run.state.results.cut.get(group.index):
        run.counters["surplus_tokens"] += sum(cut)
        run.counters["surplus_sessions"] += len(cut)


def _reject_judged(run: ServedRun, claim: Claim) -> None:
    """Reject the group of a session, as its judge says."""
    group = run.state.ledger.train_group_of(claim)
    run.reject([group.index] if group is not None else [], NOT_JUDGED)
    refuse_endless_drops(run)


def refuse_endless_drops(run: ServedRun) -> None:
    """End the run if nothing of what it has sampled for ten batches counts: it would go on for ever."""
    if fault := explain_drops(run.state):
        run.end_by(fault, ALL_DROPPED, list_incomplete(run.state))


def refuse_other_task(run: ServedRun, session: Session) -> bool:
    fault = explain_other_task(run.state, session)
    if fault:
        run.end_by(fault, "task_changed", list_incomplete(run.state))
    return bool(fault)


async def end_expired(run: ServedRun) -> None:
    """End the sessions whose time is over."""
    rules, now = run.spec.rollout, run.state.serving_s
    expired = [s for s in run.sessions.values() if s.began_at + time_of(s, rules) < now]
    ending = (_end_expired(run, s) for s in expired if s.session_id not in run.closing)
    await asyncio.gather(*ending)


async def _end_expired(run: ServedRun, session: Session) -> None:
    report = _report_expired(session, run.spec.rollout)
    try:
        await finish(run, session, report)
    except Exception as raised:
        log.warning("run %s: a session that %s: %s", run.spec.run_id, report.error, raised)


def _decide_end(ledger: Ledger, claim: Claim, result: FinishedSession, error: str) -> Finished | Failed:
    """What is recorded of a session that a runner was given: its result, or a failure that is worth none.
    `error` is the reason of a failure."""
    if claim.place.split == "train" and not result.trajectories and result.status not in REASONS:
        has_overflowed = result.status == "finished_after_overflow"
        result.status = "context_overflow" if has_overflowed else "agent_error"
        error = "the agent finished without an answer from the policy"
    if result.status not in REASONS:
        return Finished(result)
    result.error = error
    can_train = result.min_version is not None
    if decide.worth(ledger, claim, result.status, can_train) is None:
        return Failed(claim, result.status, error)
    return Finished(result)


def _complete_report(report: FinishBody, session: Session) -> FinishBody:
    """The report with what is known of its session."""
    known = {
        "task_id": report.task_id or session.task_id,
        "environment": report.environment or session.environment,
        "output": session.output if report.output is None else report.output,
    }
    return report.model_copy(update=known)


def _describe_failure(report: FinishBody, session: Session, rules: RolloutConfig, error: str) -> FinishBody:
    """The report as that of a failure, with the reward that it counts with."""
    cause = report.cause if session.answer is None else "reward"
    return report.of_failure(error, cause, rules.failed_reward)


def _report_expired(session: Session, rules: RolloutConfig) -> FinishBody:
    """The report of a session whose time is over."""
    limit = f"{time_of(session, rules):g} s"
    error, cause = f"ran longer than {limit}", "time"
    if session.answer is not None:
        error, cause = f"got no reward within {limit} of its answer", "reward"
    return FinishBody.model_validate({"status": "failed", "cause": cause, "error": error})


def _refuse_unrecorded(session: Session, error: Exception) -> ApiError:
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


def _fault_of_parts(report: FinishBody, claim: Claim, spec: RunSpec) -> ApiError | None:
    """What is wrong with the reward of a training session without the part that says whether it was right."""
    success = spec.rollout.success
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


def time_of(session: Session, rules: RolloutConfig) -> float:
    """Longest time of a session, in seconds: until its agent has answered, or from then until its reward."""
    if session.answer is None:
        return rules.session_timeout_s
    return rules.reward_patience_s if session.is_external else rules.score_timeout_s
