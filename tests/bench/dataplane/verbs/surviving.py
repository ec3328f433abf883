"""All that a restart has to find of a run."""

from __future__ import annotations

from collections.abc import Mapping, Set
from copy import deepcopy
from typing import Any

from sf_core.dataplane.runs.groups import Group
from sf_core.dataplane.runs.ledger import Ledger
from sf_core.dataplane.runs.run import ServedRun
from sf_core.dataplane.sessions.claims import Claim, SessionSlot
from sf_core.dataplane.sessions.finished import FinishedSession
from sf_core.dataplane.sessions.session import Session
from sf_core.recipes.curriculum import PastGroup
from sf_core.recipes.outcomes import Pick, TaskRef


def surviving(run: ServedRun) -> dict[str, Any]:
    """What a restart finds, with the journal as it is and with a compacted one."""
    state = run.state
    ledger = state.ledger
    last = ledger.next_batch - 1
    newest = max(ledger.evaluations, default=0)
    ended = [*ledger.ended_by.get(last, ()), *ledger.ended]
    results = {
        place: (*rows_of(result), state.ends.find(result.session_id))
        for place, result in state.results.by_slot.items()
    }
    sessions = sorted(run.sessions.items())
    return {
        "weights": (state.weights, run.router.weights, ledger.version),
        "groups": {index: members(group) for index, group in ledger.groups.items()},
        "evaluation": [(v, members(group)) for v, group in ledger.evaluations.items() if v == newest],
        "rejected": ledger.rejected,
        "done": ledger.list_done_before(ledger.next_batch),
        "ended": [one for one in ended if one.results and one.pick],
        "next_batch": ledger.next_batch,
        "last_batch": (ledger.batches.get(last), state.answers.get(last)),
        "sessions": {name: facts(session) for name, session in sessions},
        "results": {at: results[at] for at in results if at.split == "train" or at.group == newest},
        "opened": [(name, *rows_of(result)) for name, result in state.results.external.items()],
        "ends": {name: state.ends.find(name) for name in list_latest(run)},
        "released": state.released,
        "paused": (state.paused, run.router.paused),
        "revoked": state.revoked_leases,
    }


def rows_of(result: FinishedSession) -> tuple[Any, ...]:
    """What a result counts as, and what its rows tell."""
    rows = [(row.task_id, row.output, int(row.loss_mask.sum())) for row in result.trajectories]
    return result.reward, result.status, result.error, rows


def facts(session: Session) -> dict[str, Any]:
    """What is known of an open session."""
    names = "claim group task_id environment metadata answer output earned num_unjudged judgements"
    names += " has_overflowed num_sampled by_operator"
    return {name: getattr(session, name) for name in names.split()}


def list_latest(run: ServedRun) -> list[str]:
    """The sessions that were given out last, of all groups."""
    slots = [(g, i, m) for g in run.state.ledger.groups.values() for i, m in enumerate(g.members)]
    claims = [Claim(SessionSlot(g.split, g.index, i), m.attempt) for g, i, m in slots]
    return [claim.session_id(run.spec.run_id) for claim in claims]


def members(group: Group) -> list[Any]:
    return [(m.progress, m.attempt, m.num_failures, m.result, m.min_version) for m in group.members]


def memory(ledger: Ledger, untold: Set[int]) -> dict[str, Any]:
    """What decides the tasks to come. Groups that are `untold` are not in the run directory, so that a later
    curriculum forgets them."""
    return {
        # without a curriculum none is needed, and after a restart there is none
        "past": _past(ledger, untold) if ledger.rules.curriculum else {},
        "positions": ledger.tasks.positions,
        "in_flight": ledger.tasks.in_flight,
        "picks": {index: (group.pick, group.version) for index, group in ledger.groups.items()},
        "ended": ledger.ended,
        "next": [] if untold else next_picks(ledger),
    }


def _past(ledger: Ledger, untold: Set[int]) -> dict[TaskRef, list[PastGroup]]:
    past = ledger.tasks.past
    told = {task: [one for one in past[task] if one.group not in untold] for task in sorted(past)}
    return {task: known for task, known in told.items() if known}


def next_picks(ledger: Ledger) -> list[Pick]:
    """The picks of the next ten groups."""
    tasks = deepcopy(ledger.tasks)
    picks = []
    for number in range(10):
        picks.append(tasks.pick(10**6 + number, ledger.next_batch))
        tasks.note(picks[-1])
    return picks


def check_same(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Nothing has changed by a restart."""
    assert before == after, f"before and after the restart: {_differences(before, after)}"


def _differences(before: Any, after: Any) -> Any:
    if not (isinstance(before, Mapping) and isinstance(after, Mapping)):
        return before, after
    names = [*before, *(name for name in after if name not in before)]
    pairs = {name: (before.get(name, "-"), after.get(name, "-")) for name in names}
    return {name: _differences(*pair) for name, pair in pairs.items() if pair[0] != pair[1]}
