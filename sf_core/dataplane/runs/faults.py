"""What ends a run: nothing that it samples counts, or its tasks change. The sentences say what to mend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sf_core.config.failures import failures_text
from sf_core.dataplane.runs.groups import Group
from sf_core.dataplane.runs.state import RunState
from sf_core.dataplane.sessions.claims import Claim, SessionSlot
from sf_core.dataplane.sessions.session import Session
from sf_core.recipes.gates import GATE_REASONS

MAX_DROPPED_BATCHES = 10
"""Batches whose groups may all be dropped, one after the other, before the run ends."""

ALL_DROPPED = "all_dropped"
"""Why the groups are rejected that are in flight when it ends by that."""

NOT_JUDGED = "not_judged"
"""Why a group is rejected for which `environment.group_reward` gives no rewards."""


def list_incomplete(state: RunState) -> list[Group]:
    """The run's own groups that are not complete."""
    return [g for g in state.ledger.groups.values() if not (g.is_outside or g.is_complete)]


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
        f"the last {total} groups were all dropped ({failures_text(dropped)}), so that no batch gets "
        f"full: {_way_out(state, dropped)}"
    )


def _way_out(state: RunState, dropped: Mapping[str, int]) -> str:
    """What to do when groups are dropped for these reasons."""
    most = max(dropped, key=lambda reason: dropped[reason])
    if most == NOT_JUDGED:
        return "environment.group_reward returns None for them; take larger groups, or other tasks"
    if most not in GATE_REASONS:
        return f"mend what fails, the last was {state.recent.last_error or 'not recorded'}"
    return (
        f"rollout.gate {state.spec.rollout.gate.kind} lets none pass; take tasks that the policy "
        "solves now and then, correct rollout.success, or set rollout.gate to all"
    )


def explain_other_task(state: RunState, session: Session) -> str:
    """Why a run ends in which other sessions of the group are named after another task than this one: rewards
    are compared within a group. Empty if they are not."""
    claim = session.claim
    if not session.task_id or claim is None or claim.is_outside or claim.place.split != "train":
        return ""
    named = {(session.task_id, session.environment), *_tasks_of_group(state, claim.place)}
    if len(named) == 1:
        return ""
    shown = " and ".join(f"{task_id!r} of {environment!r}" for task_id, environment in sorted(named)[:2])
    return (
        f"{state.spec.tasks} changes between two calls: sessions of group {claim.place.group}, which work "
        f"on one task, got {shown}. Equal arguments must give equal tasks, in every process"
    )


def _tasks_of_group(state: RunState, place: SessionSlot) -> Iterator[tuple[str, str]]:
    """Id and environment of each task that a session of this group has named."""
    group = state.ledger.groups.get(place.group)
    for index, member in enumerate(group.members if group is not None else ()):
        other = Claim(place._replace(member=index), member.attempt)
        session = state.sessions.get(other.session_id(state.spec.run_id))
        result = state.results.by_place.get(other.place)
        for named in (session, *(result.trajectories[:1] if result is not None else ())):
            if named is not None and named.task_id:
                yield named.task_id, named.environment
