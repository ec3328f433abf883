"""Registrations of a run, and its recovery from its journal after the data plane died.

A restarted data plane opens by itself the runs that were open (journal/ownership.py). A run that a flow
registers is restored from its journal first, and then registered like one that was open all the time. What
other events do to a run is in state.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import NamedTuple

from sf_core.dataplane.api_schemas import RunSpec
from sf_core.dataplane.chat.renderer import read_renderer
from sf_core.dataplane.errors import ApiError, is_temporary
from sf_core.dataplane.journal.journal import Journal
from sf_core.dataplane.runs import decide
from sf_core.dataplane.runs.claiming import lose
from sf_core.dataplane.runs.endings import explain_drops
from sf_core.dataplane.runs.events import (
    Admitted,
    Finished,
    Opened,
    Registered,
    Rejected,
    RunEvent,
    read_event,
)
from sf_core.dataplane.runs.results import outcome_of
from sf_core.dataplane.runs.run import ServedRun
from sf_core.dataplane.runs.runners import Runner
from sf_core.dataplane.runs.state import RunState
from sf_core.dataplane.sessions.memory_budget import MemoryBudget
from sf_core.dataplane.sessions.session import Session
from sf_core.recipes.curriculum import Tasks
from sf_core.recipes.outcomes import Outcome, Pick, TaskRef
from storage.errors import StorageError
from storage.run_directory import RunDirectory
from storage.tables.outcomes import read_outcomes


async def open_run(spec: RunSpec, journal: Journal, grace_s: float, memory: MemoryBudget) -> ServedRun:
    """Open a registered run, restored from its journal if that holds it. Raises ApiError if it cannot."""
    run = await reopen_run(journal, grace_s, memory, remembers=spec.rollout.curriculum is not None)
    if run is not None and run.spec.origin != spec.origin:
        run = await begin_anew(run, spec)
    elif run is not None:
        await begin_attempt(run, spec)
    else:
        state = await _new_state(spec, memory)
        run = await _serve(state, journal, grace_s)
        run.journal.append_later(Registered(spec))
    try:
        await journal.flush()
    except ApiError:
        run.state.free_memory()
        raise
    return run


async def _serve(state: RunState, journal: Journal, grace_s: float) -> ServedRun:
    return ServedRun(state, await read_renderer(state.spec.model_dir), journal, grace_s)


async def _new_state(spec: RunSpec, memory: MemoryBudget, remembers: bool = True) -> RunState:
    """A run with the progress that `spec` states. Raises ApiError 409 if its curriculum cannot be told what
    came of earlier groups."""
    outcomes = await _read_outcomes(spec) if remembers else []
    state = RunState(spec, memory)
    if outcomes:
        # nothing else has the run yet, and a large pool would hold up the other runs for seconds
        await asyncio.to_thread(_remember, state.ledger.tasks, outcomes)
    return state


def _remember(tasks: Tasks, outcomes: list[Outcome]) -> None:
    tasks.observe(outcomes)
    tasks.weigh()


async def _read_outcomes(spec: RunSpec) -> list[Outcome]:
    """What came of the groups of the iterations before that of `spec`, if a curriculum goes by it. Raises
    ApiError 409 if a file is missing or broken, StorageError if the cause may pass."""
    if spec.rollout.curriculum is None:
        return []
    try:
        directory = RunDirectory(spec.run_dir)
        return await asyncio.to_thread(
            lambda: [outcome_of(row) for row in read_outcomes(directory, spec.iteration)]
        )
    except (ValueError, StorageError) as error:
        if isinstance(error, StorageError) and is_temporary(error):
            raise
        raise ApiError(
            409,
            f"the curriculum cannot read the results of earlier groups: {error}; to continue without these "
            "results, remove rollout.curriculum from the configuration, or remove the manifests of this "
            "and all later iterations",
        ) from None


async def begin_anew(run: ServedRun, spec: RunSpec) -> ServedRun:
    """Open a run whose version 0 was made again, in place of `run`, which must be released. Raises ApiError
    if it cannot be opened."""
    first = run.spec.first_attempt
    async with aclosing(read_events(run.journal)) as events:
        async for event in events:
            if isinstance(event, Opened):
                claims = [opened.claim for opened in event.facts if opened.claim is not None]
                first = max([first, *(claim.attempt + 1 for claim in claims)])
    # an agent that is still at work has the name of its session, which must not be given to another one
    spec = spec.model_copy(update={"first_attempt": first})
    run.memory.watchers.discard(run.changed)
    fresh = await _serve(_replace(run.state, spec), run.journal, run.turns.grace_s)
    run.journal.append_later(Registered(spec))
    return fresh


def _replace(state: RunState, spec: RunSpec) -> RunState:
    """A run that takes over what external agents have finished, because it is still to be stored, and nothing
    else."""
    fresh = RunState(spec, state.memory)
    opened = list(state.results.external.values())
    state.free_memory()
    for result in opened:
        fresh.results.add_external(result)
    return fresh


async def reopen_run(
    journal: Journal, grace_s: float, memory: MemoryBudget, remembers: bool = True
) -> ServedRun | None:
    """Restore a run from its journal; None if that holds none. Raises ApiError if it cannot be opened. Unless
    the run `remembers`, because it is to go on without a curriculum, no outcomes are read."""
    state: RunState | None = None
    num_applied = 0
    async with aclosing(read_events(journal)) as events:
        async for event in events:
            if isinstance(event, Registered):
                spec = event.spec
                if state is None:
                    state = await _new_state(spec, memory, remembers)
                elif state.spec.origin != spec.origin:
                    state = _replace(state, spec)
                else:
                    past = await _read_past(state, spec, journal, num_applied, remembers)
                    state = _register(state, spec, past)
            elif state is None:
                break
            else:
                state.apply(event)
            num_applied += 1
    if state is None:
        return None
    run = await _serve(state, journal, grace_s)
    _go_on(run)
    return run


async def read_events(journal: Journal) -> AsyncGenerator[RunEvent]:
    """The events of a run, oldest first. Earlier versions did not record the groups of runs without gate and
    curriculum: each of these begins here before its first session, with the task of its number."""
    begun: set[int] = set()
    spec: RunSpec | None = None
    async with aclosing(journal.replay(read_event)) as events:
        async for event in events:
            match event:
                case Registered(registered):
                    if spec is not None and spec.origin != registered.origin:
                        begun.clear()
                    spec = registered
                case Admitted(group):
                    begun.add(group)
                case Opened() if spec is not None:
                    for group in _list_own_groups(event):
                        if group not in begun and group not in spec.done_groups:
                            begun.add(group)
                            need = spec.rollout.group_size
                            pick = Pick(TaskRef("", group), 0, need, need + spec.rollout.spare_sessions)
                            yield Admitted(group, pick, spec.version)
            yield event


def _list_own_groups(opened: Opened) -> list[int]:
    """The groups of the run's own of which sessions were given out."""
    claims = [session.claim for session in opened.facts if session.claim and not session.claim.is_external]
    return sorted({claim.slot.group for claim in claims if claim.slot.split == "train"})


class Past(NamedTuple):
    """What a registration takes over from earlier."""

    outcomes: list[Outcome]
    """Groups that have left in iterations before the one that it states."""
    events: list[RunEvent]
    """Results, rejections, picks and claims of the journal, if the run starts over."""


async def _read_past(
    state: RunState, spec: RunSpec, journal: Journal, num_events: int | None = None, remembers: bool = True
) -> Past:
    """What this registration takes over, with the first `num_events` events of the journal (None: all)."""
    past = Past([], [])
    if spec.attempt < state.spec.attempt:
        return past
    starts_over = not state.ledger.knows_batch(spec.iteration)
    if remembers and (starts_over or state.spec.rollout.curriculum is None):
        past.outcomes.extend(await _read_outcomes(spec))
    return past._replace(events=await _past_events(spec, journal, num_events)) if starts_over else past


async def _past_events(spec: RunSpec, journal: Journal, num_events: int | None) -> list[RunEvent]:
    past = list[RunEvent]()
    is_ours = True
    async with aclosing(read_events(journal)) as events:
        async for event in events:
            if num_events == 0:
                break
            num_events = None if num_events is None else num_events - 1
            match event:
                case Registered(registered):
                    is_ours = registered.origin == spec.origin
                case _ if not is_ours:
                    pass
                case Rejected() | Opened() | Admitted():
                    past.append(event)
                case Finished(result) if result.claim is not None and result.claim.slot.split == "train":
                    if not result.claim.is_external:
                        past.append(event)
    return past


async def begin_attempt(run: ServedRun, spec: RunSpec) -> bool:
    """Register an attempt of the flow, or the same again: finished sessions are kept; another attempt gives
    out running ones again, whose runners belong to an earlier one. True if the run starts over from the
    progress that `spec` states. Raises ApiError 409."""
    past = await _read_past(run.state, spec, run.journal)
    if spec.attempt < run.spec.attempt:
        raise ApiError.superseded(spec.run_id, spec.attempt)
    spec = spec.model_copy(update={"first_attempt": run.spec.first_attempt})
    starts_over = not run.state.ledger.knows_batch(spec.iteration)
    if spec.attempt > run.spec.attempt:
        run.fault = ""
        for session in _list_claimed(run):
            lose(run, session)
            if session.session_id in run.sessions and spec.judges_groups != run.spec.judges_groups:
                run.take_back(session, "answers are scored in another way from now on")
    if starts_over:
        for session in _list_claimed(run):
            run.take_back(session, "the run starts over")
        external = run.reject_external("started_over")
        past.events.extend(Rejected(index, "started_over") for index in external)
    run.take_over(_register(run.state, spec, past))
    if starts_over:
        _judge_past(run)
    run.journal.append_later(Registered(spec))
    return starts_over


def _list_claimed(run: ServedRun) -> list[Session]:
    return [session for session in run.sessions.values() if not session.is_external]


def _register(state: RunState, spec: RunSpec, past: Past) -> RunState:
    """The run in which another attempt is registered: it goes on, or starts over with what is left of the
    past."""
    starts_over = not state.ledger.knows_batch(spec.iteration)
    state.apply(Registered(spec))
    if not starts_over:
        state.ledger.remember(past.outcomes)
        return state
    fresh = state.start_over()
    fresh.ledger.tasks.observe(past.outcomes)
    for event in past.events:
        if not isinstance(event, Opened):
            fresh.apply(event)
            continue
        for opened in event.facts:
            if opened.claim is not None and not opened.claim.is_external:
                fresh.ledger.note_given_out(opened.claim)
    fresh.ledger.forget_dropped()
    return fresh


def _judge_past(run: ServedRun) -> None:
    """Reject the groups of the past that do not count any more."""
    ledger = run.state.ledger
    for group in list(ledger.groups.values()):
        if reason := decide.judge(ledger, group):
            run.record(Rejected(group.index, reason))
    ledger.forget_dropped()


def _go_on(run: ServedRun) -> None:
    """Let the open sessions of a restored run go on, unless the run has to end."""
    ledger = run.state.ledger
    # from now on no engine samples with an older version
    ledger.set_version(run.state.weights.version)
    for index, reason in decide.judge_again(ledger):
        run.reject([index], reason)
    run.reject_halves(ledger.groups.values())
    run.fault = explain_drops(run.state) or run.state.spent.explain_excess(run.spec.judge_budgets)
    for session in _list_claimed(run):
        if not run.state.counts(session):
            run.state.forget(session.session_id)
        elif session.runner:
            # a runner that died meanwhile is found silent as any other
            run.runners.setdefault(session.runner, Runner(run.spec.attempt))
