"""How the sessions of a run end: a report becomes a result, a retry, or a rejected group.

An end may end the run too, if nothing counts that the run samples or its tasks change. A session never blocks
its batch: if exporting it fails, it ends with that as its failure. What a failure is worth is decided in
decide.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from sf_core.config import RolloutConfig
from sf_core.config.rollout_config import REASONS, failures_text
from sf_core.dataplane.api_schemas import FinishBody, RewardBody
from sf_core.dataplane.errors import ApiError, WrongField
from sf_core.dataplane.runs import decide, events
from sf_core.dataplane.runs.ledger import Ledger
from sf_core.dataplane.runs.results import digest_of, fault_of, fault_of_parts
from sf_core.dataplane.runs.run import ServedRun
from sf_core.dataplane.runs.state import RunState
from sf_core.dataplane.sessions.claims import Claim
from sf_core.dataplane.sessions.finished import FinishedSession, finish_session
from sf_core.dataplane.sessions.session import Session
from sf_core.recipes.gates import GATE_REASONS

log = logging.getLogger(__name__)

MAX_DROPPED_BATCHES = 10
"""Batches whose groups may all be dropped, one after the other, before the run ends."""

SCORING_GRACE_S = 30.0
"""Seconds in which a runner that scores an answer may tell that its time is over."""

ALL_DROPPED = "all_dropped"
"""Why the groups are rejected that are in flight when it ends by that."""

NOT_JUDGED = "not_judged"
"""Why a group is rejected for which `environment.group_reward` gives no rewards, or no judge does."""


async def reward(run: ServedRun, session: Session, body: RewardBody) -> None:
    """Note what a session has earned so far, which stays open. Raises ApiError 400."""
    if refusal := fault_of(body, session):
        raise refusal
    rewards = body.reward, body.reward_parts, body.step_rewards
    await run.record_now(events.Rewarded(session.session_id, *rewards))


async def finish(run: ServedRun, session: Session, report: FinishBody) -> bool:
    """End a session as its agent or runner reports. Returns when the result is on disk: whether this report
    ended the session. Raises ApiError 503 while the result of an earlier report is not on disk, and 409 as
    `answer_late` does."""
    if run.sessions.get(session.session_id) is not session:
        return answer_late(run, session.session_id, report)
    await _finish(run, session, report, digest_of(report))
    return True


def answer_late(run: ServedRun, session_id: str, report: FinishBody) -> bool:
    """Whether a session that has ended was ended by this very report, which its sender sends again. Others
    change nothing and are counted. Raises ApiError 409 if another report ended it, and 503 while its end is
    being recorded."""
    run.closing.check(session_id)
    digest = run.state.ends.find(session_id)
    if digest is not None and digest == digest_of(report):
        return True
    is_another = digest is not None and report.status in ("finished", "failed")
    kind = "refused_reports" if is_another else "late_reports"
    run.counters[kind] += 1
    run.state.recent.reports[kind] += 1
    if not is_another:
        return False
    log.warning("run %s: a second report on session %s differs and is refused", run.spec.run_id, session_id)
    message = f"Session {session_id} has ended by another report: this report changes nothing."
    raise ApiError(409, message, code="already_ended")


async def _finish(run: ServedRun, session: Session, report: FinishBody, digest: str) -> None:
    with run.closing.holding(session):
        session.report = digest
        if session.is_external and (report.status == "unjudged" or report.judgements):
            raise WrongField("judgements", "External agents cannot ask judges: send a reward.")
        refusal = _end(run, session, report.or_earlier(session.earned))
        if fault := run.state.spent.explain_excess(run.spec.judge_budgets):
            run.end_by(fault, "overspent", [])
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
            run.record(events.Answered(session.session_id, report.answer or "null", report.output))
        return None
    if report.status == "unjudged":
        _score_again(run, session, report)
        return None
    if claim is None or run.state.mode_of(session) == "log":
        return _end_logged(run, session, report)
    if report.status == "failed" and report.cause == "group":
        run.state.note_judgements(report.judgements)
        _reject_judged(run, claim)
        return None
    rules = run.spec.rollout
    if report.status == "failed":
        error = report.error or "no reason given"
        return _end_given(run, session, claim, _describe_failure(report, session, rules, error))
    if refusal := fault_of(report, session) or fault_of_parts(report, claim, run.spec):
        scored = report.model_copy(update={"cause": "reward"})
        _end_given(run, session, claim, _describe_failure(scored, session, rules, refusal.message))
        return refusal
    return _end_given(run, session, claim, report)


def _end_logged(run: ServedRun, session: Session, report: FinishBody) -> ApiError | None:
    """End an external session of mode log. If it failed it leaves nothing; without a reward it stays open."""
    run.journal.check()
    closed = events.Closed(session.session_id, session.report)
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
    run.record(events.finished(result))
    run.counters["opened_sessions"] += 1
    return None


def _end_given(run: ServedRun, session: Session, claim: Claim, report: FinishBody) -> ApiError | None:
    """End a session that a runner was given; the report has a reward, also that of a failure."""
    session.task_id = report.task_id or session.task_id
    session.environment = report.environment or session.environment
    if report.output is None:
        report = report.model_copy(update={"output": session.output})
    if refuse_other_task(run, session):
        return None
    refusal = None
    error = report.error or ""
    try:
        result = _take_out(run, session, report)
    except Exception as raised:  # whatever it is must not cost the place
        refusal = _refuse_unrecorded(session, raised)
        error = refusal.message
        earned = run.spec.rollout.failed_reward
        result = FinishedSession(
            session.session_id, claim, earned, session.environment, None, None, [], "not_recorded"
        )
        result.report = session.report
    ended = _decide_end(run.state.ledger, claim, result, error)
    if isinstance(ended, events.Failed):
        run.state.note_judgements(result.judgements[len(session.judgements) :])
    if result.status in REASONS:
        run.counters["failed_sessions"] += 1
        run.counters[f"failures.{result.status}"] += 1
    else:
        run.counters["finished_sessions"] += 1
    run.record(ended)
    _judge(run, claim)
    return refusal


def _score_again(run: ServedRun, session: Session, report: FinishBody) -> None:
    """Have an answer that could not be judged scored again, unless that was the last time."""
    claim = session.claim
    assert claim is not None
    if session.answer is None:
        run.record(events.Answered(session.session_id, report.answer or "null", report.output))
    elif report.scoring != session.scoring or not session.scoring:
        return  # it was told before, or another runner has the answer by now
    error = report.error or "no reason given"
    run.record(events.Unjudged(session.session_id, error, report.judgements))
    if session.num_unjudged < run.spec.rollout.session_attempts:
        return
    if claim.slot.split == "train":
        _reject_judged(run, claim)
    else:
        _end_unjudged(run, session, claim, report, error)


def _end_unjudged(run: ServedRun, session: Session, claim: Claim, report: FinishBody, error: str) -> None:
    """End a held-out session without a reward. As long as none of its evaluation was judged it stays, and the
    run ends when that is so of all."""
    group = run.state.ledger.evaluations.get(claim.slot.group)
    if group is None:
        return
    if any(result.status not in REASONS for result in group.results):
        # what was asked is with the session
        fields: dict[str, Any] = {"error": error, "reward": None, "judgements": []}
        _end_given(run, session, claim, report.model_copy(update=fields))
        return
    attempts = run.spec.rollout.session_attempts
    waiting = [
        session
        for session in run.state.sessions_of("holdout", group.index)
        if session.num_unjudged >= attempts
    ]
    if len(waiting) == group.num_left:
        run.end_by(
            f"no answer of the evaluation of version {group.index} could be judged; each of {len(waiting)} "
            f"answers was tried {attempts} times: {error}. Check that the judges answer, then resume the run",
            NOT_JUDGED,
            [],
        )


def _take_out(run: ServedRun, session: Session, report: FinishBody) -> FinishedSession:
    """Stop serving a session and return its result. Raises whatever its export raises."""
    run.part(session, report.parting)
    run.turns.abandon_undelivered(session)
    return finish_session(
        run.spec, session, report, run.renderer.stop_token_ids, run.renderer.image_processor
    )


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
        run.end_by(fault, ALL_DROPPED, run.state.ledger.list_incomplete())


def refuse_other_task(run: ServedRun, session: Session) -> bool:
    fault = _explain_other_task(run.state, session)
    if fault:
        run.end_by(fault, "task_changed", run.state.ledger.list_incomplete())
    return bool(fault)


async def end_expired(run: ServedRun) -> None:
    """End the sessions whose time is over."""
    rules = run.spec.rollout
    now = run.state.serving_s
    expired = [s for s in run.sessions.values() if s.began_at + time_of(s, rules) < now]
    ending = (
        _end_expired(run, s) for s in expired if s.session_id not in run.closing and not _is_unjudged(run, s)
    )
    await asyncio.gather(*ending)


def _is_unjudged(run: ServedRun, session: Session) -> bool:
    """Whether it is no fault of an answer that it has no reward: a judge is away, or starts. A runner that
    scores tells of the end of its time by itself, and whether it waits for a judge."""
    if session.answer is None or session.is_external:
        return False
    rules = run.spec.rollout
    age = run.state.serving_s - session.began_at
    is_waiting = run.spec.scored_apart and not session.scoring
    is_late = bool(session.scoring) and age < rules.score_timeout_s + SCORING_GRACE_S
    return bool(session.num_unjudged) or is_waiting or is_late


async def _end_expired(run: ServedRun, session: Session) -> None:
    report = _report_expired(session, run.spec.rollout)
    try:
        await _finish(run, session, report, digest="")
    except Exception as raised:
        log.warning("run %s: a session that %s: %s", run.spec.run_id, report.error, raised)


def _decide_end(
    ledger: Ledger, claim: Claim, result: FinishedSession, error: str
) -> events.Finished | events.Failed:
    """What is recorded of a session that a runner was given: its result, or a failure that is worth none.
    `error` is the reason of a failure."""
    if claim.slot.split == "train" and not result.trajectories and result.status not in REASONS:
        has_overflowed = result.status == "finished_after_overflow"
        result.status = "context_overflow" if has_overflowed else "agent_error"
        error = "the agent finished without an answer from the policy"
    if result.status not in REASONS:
        return events.finished(result)
    result.error = error
    can_train = result.min_version is not None
    if decide.worth(ledger, claim, result.status, can_train) is None:
        return events.Failed(claim, result.status, error, result.report)
    return events.finished(result)


def _describe_failure(report: FinishBody, session: Session, rules: RolloutConfig, error: str) -> FinishBody:
    """The report as that of a failure, with the reward that it counts with."""
    cause = report.cause if session.answer is None else "reward"
    return report.of_failure(error, cause, rules.failed_reward)


def _report_expired(session: Session, rules: RolloutConfig) -> FinishBody:
    """The report of a session whose time is over."""
    limit = f"{time_of(session, rules):g} s"
    error = f"ran longer than {limit}"
    cause = "time"
    if session.answer is not None:
        error = f"got no reward within {limit} of its answer"
        cause = "reward"
    return FinishBody.model_validate({"status": "failed", "cause": cause, "error": error})


def _refuse_unrecorded(session: Session, error: Exception) -> ApiError:
    """The error with which the report of an end is answered."""
    if isinstance(error, ApiError):
        return error
    log.error("session %s could not be recorded", session.session_id, exc_info=error)
    cause = f"{type(error).__name__}: {error}"
    return ApiError(500, f"Session {session.session_id} could not be recorded: {cause}.")


def time_of(session: Session, rules: RolloutConfig) -> float:
    """Longest time of a session, in seconds: until its agent has answered, or from then until its reward."""
    if session.answer is None:
        return rules.session_timeout_s
    return rules.reward_patience_s if session.is_external else rules.score_timeout_s


def explain_drops(state: RunState) -> str:
    """Why a run ends whose groups were all dropped for ten batches, one after the other: it would go on for
    ever. Empty for any other."""
    counts = state.ledger.dropped_in_a_row
    # those that ended with the run are no reason for its end
    dropped = {reason: counts[reason] for reason in counts if reason != ALL_DROPPED}
    total = sum(dropped.values())
    if total < MAX_DROPPED_BATCHES * state.spec.rollout.groups_per_batch:
        return ""
    if state.recent.failures_in_a_row >= total:
        # no session succeeds, which the wait for the batch ends with what the last one said
        return ""
    return (
        f"the last {total} groups were all dropped ({failures_text(dropped)}), so no batch can be "
        f"completed: {_way_out(state, dropped)}"
    )


def _way_out(state: RunState, dropped: Mapping[str, int]) -> str:
    """What to do when groups are dropped for these reasons."""
    most = max(dropped, key=lambda reason: dropped[reason])
    if most == NOT_JUDGED and state.counters["unjudged"]:
        return f"check that the judges answer; the last error was {state.recent.last_error or 'not recorded'}"
    if most == NOT_JUDGED:
        return "environment.group_reward returns None for these groups; use larger groups, or other tasks"
    if most not in GATE_REASONS:
        return f"fix the failure; the last error was {state.recent.last_error or 'not recorded'}"
    return (
        f"rollout.gate {state.spec.rollout.gate.kind} rejects every group; use tasks that the policy "
        "sometimes solves, correct rollout.success, or set rollout.gate to all"
    )


def _explain_other_task(state: RunState, session: Session) -> str:
    """Why a run ends in which other sessions of the group are named after another task than this one: rewards
    are compared within a group. Empty if they are not."""
    claim = session.claim
    if not session.task_id or claim is None or claim.is_external or claim.slot.split != "train":
        return ""
    named = {(session.task_id, session.environment)}
    if group := state.ledger.train_group_of(claim):
        named |= state.tasks_of(group)
    if len(named) == 1:
        return ""
    named_tasks = " and ".join(
        f"{task_id!r} of {environment!r}" for task_id, environment in sorted(named)[:2]
    )
    return (
        f"{state.spec.tasks} gave different tasks for equal arguments: sessions of group "
        f"{claim.slot.group} got {named_tasks}. Equal arguments must give equal tasks, in every process"
    )
