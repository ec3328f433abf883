"""Gives sessions to those who work on them: runners that claim them, and external agents that open them.

Owns what a claim gives out: sessions that the rollout manager begins (decide.py), and answers to be scored. A
session whose runner is gone, silent or does not name it is given out again.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Mapping

from sf_core.dataplane.api_schemas import ClaimBody, GroupBody, SessionBody, TaskName
from sf_core.dataplane.runs import decide, events
from sf_core.dataplane.runs.endings import refuse_other_task
from sf_core.dataplane.runs.events import OpenedSession
from sf_core.dataplane.runs.groups import Group
from sf_core.dataplane.runs.run import ServedRun
from sf_core.dataplane.runs.runners import Runner, give_to
from sf_core.dataplane.sessions.session import Session

log = logging.getLogger(__name__)

RUNNER_SILENCE_S = 15.0
"""A runner not heard from for this long loses its sessions."""


async def claim(run: ServedRun, body: ClaimBody) -> tuple[list[Session], bool]:
    """Sessions for a runner, and whether it is released. Waits for some; is a sign of life of the runner.
    Sessions with an answer are to be scored."""
    attempt = run.spec.attempt if body.attempt is None else body.attempt
    runner = run.runners.setdefault(body.runner, Runner(attempt, work=body.work))
    run.effort.record(body.runner, body.spent.since(runner.spent or body.spent))
    runner.spent = body.spent
    if body.running is not None:
        named = set(body.running)
        for session in run.sessions_of(body.runner):
            if session.session_id not in named:
                lose(run, session)
    sessions: list[Session] = []
    runner.num_polls += 1
    try:
        await _note_tasks(run, body.tasks)
        for answered in (run.sessions.get(session_id) for session_id in body.answered):
            # the answer itself may have come before
            if answered is not None and answered.answer is None and not answered.is_external:
                answered.began_at = math.inf
        await run.changed.until(
            lambda: _is_released(run, body.runner) or _give_out(run, body.runner, body.max, sessions),
            body.wait_s,
        )
    finally:
        runner.num_polls -= 1
        runner.silent_s = 0.0
    for session in sessions:
        if session.answer is not None:
            session.began_at = run.state.serving_s
    if any(session.answer is None for session in sessions):
        # if this is refused, the runner does not name them in its next claim, and they are taken back
        await run.journal.await_unless_failing(run.journal.flush())
    return sessions, _is_released(run, body.runner)


async def open_session(run: ServedRun, body: SessionBody, by_operator: bool) -> Session:
    """Open an external session, which no runner was given."""
    session_id = f"{run.spec.run_id}.open.{secrets.token_hex(8)}"
    facts = body.model_dump(include={"group", "task_id", "environment", "metadata"})
    [session] = run.open([OpenedSession(session_id, by_operator=by_operator, **facts)])
    await run.journal.flush()
    return session


async def declare_group(run: ServedRun, body: GroupBody, by_operator: bool) -> list[Session]:
    """Open the sessions of a group that external agents work on; none if there is no place for it now. A
    client is not given the sessions that the operator opened under the same name."""
    if declared := _find_declared(run, body.name, by_operator):
        return declared
    decide_claims = decide.declare if body.split == "train" else decide.claim_held_out
    size = body.size or run.spec.rollout.group_size
    claims = decide_claims(run.state.ledger, size)
    facts = body.model_dump(include={"task_id", "environment", "metadata"})
    facts |= {"group": body.name, "by_operator": by_operator}
    run_id = run.spec.run_id
    sessions = run.open([OpenedSession(claim.session_id(run_id), claim, **facts) for claim in claims])
    await run.journal.flush()
    return sessions


def _find_declared(run: ServedRun, name: str | None, by_operator: bool) -> list[Session]:
    """Sessions of the group that was declared under this name, as far as the sender may have them."""
    if not name:
        return []
    return [
        session
        for session in run.sessions.values()
        if session.claim and session.group == name and (by_operator or not session.by_operator)
    ]


def is_scored_elsewhere(run: ServedRun) -> bool:
    """Whether agent runners leave the scoring to reward runners."""
    return run.spec.scored_apart or run.runners.count("reward", run.spec.attempt) > 0


def take_from_silent_runners(run: ServedRun, elapsed_s: float) -> None:
    """Give the sessions of runners to others that were not heard for too long."""
    for name in run.runners.take_silent(elapsed_s, RUNNER_SILENCE_S):
        log.warning("runner %s is silent, so its sessions are assigned again", name)
        for session in run.sessions_of(name):
            lose(run, session)


def lose(run: ServedRun, session: Session) -> None:
    """Free the place or the answer of a session whose runner is gone or did not name it, for another."""
    state = run.state
    group = state.ledger.train_group_of(session.claim)
    if session.answer is None:
        run.take_back(session, "the session was given to another runner")
        run.counters["retries"] += 1
    elif session.runner and not state.judges(session):
        state.scoring.queue(session)
    elif session.runner and group is not None and not run.reject_halves([group]):
        state.scoring.hold_back(session)
        state.queue_group(session.claim)
    run.changed.notify()


async def _note_tasks(run: ServedRun, tasks: Mapping[str, TaskName]) -> None:
    """Record the tasks of sessions: rows of a session that its runner does not end need them too."""
    for session_id, task in tasks.items():
        session = run.sessions.get(session_id)
        if session is not None and not session.is_external:
            run.record(events.Named(session_id, task.task_id, task.environment))
            refuse_other_task(run, session)
    if tasks:
        await run.journal.await_unless_failing(run.journal.flush_chunk())


def _is_released(run: ServedRun, name: str) -> bool:
    return run.released or run.runners[name].attempt < run.spec.attempt


def _give_out(run: ServedRun, name: str, limit: int, sessions: list[Session]) -> bool:
    runner = run.runners[name]
    if run.journal.failure is not None or run.fault:
        return False
    if runner.work == "reward" or not is_scored_elsewhere(run):
        sessions += run.state.scoring.pop_answers(name, limit, run.sessions)
        sessions += _take_judged(run, name, limit - len(sessions))
    if runner.work == "agent":
        sessions += _open_claimed(run, name, max(0, limit - len(sessions)))
    return bool(sessions)


def _open_claimed(run: ServedRun, runner: str, limit: int) -> list[Session]:
    ledger = run.state.ledger
    run_id = run.spec.run_id
    for admitted in decide.admit(ledger, limit, run.memory.is_full):
        run.record(admitted)
    claims = decide.claim(ledger, limit)
    return run.open([OpenedSession(claim.session_id(run_id), claim, runner) for claim in claims])


def _take_judged(run: ServedRun, runner: str, limit: int) -> list[Session]:
    """Sessions whose answers this runner scores from now on: of whole groups, even beyond the limit."""
    claimed: list[Session] = []
    due = run.state.scoring.groups
    while due and len(claimed) < limit:
        group = run.state.ledger.groups.get(due.popleft())
        answered = [] if group is None else _take_whole(run, group)
        # at once: a group that is judged again may be queued twice
        for session in answered:
            give_to(runner, session)
        claimed += answered
    return claimed


def _take_whole(run: ServedRun, group: Group) -> list[Session]:
    """The answers of a group that no runner has; none if the end of one of them came in between. Then the
    group is rejected, if that one was scored, or the others wait for another answer."""
    unjudged = [session for session in run.state.list_answered(group) if not session.runner]
    if not unjudged or run.reject_halves([group]):
        return []
    if len(unjudged) == group.num_left:
        return unjudged
    for session in unjudged:
        run.state.scoring.hold_back(session)
    return []
