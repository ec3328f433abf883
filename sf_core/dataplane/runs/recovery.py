"""Recovery of a run from its journal after the data plane died.

Owns the reading of a journal and its registrations. A restarted data plane opens by itself the runs that were
open (open_runs.py). A run that a flow registers is restored from its journal first, and then registered like
one that was open all the time. What other events do to a run is in effects.py.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import NamedTuple

from sf_core.dataplane.bodies import RunSpec
from sf_core.dataplane.chat.renderer import read_renderer
from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.journal.journal import Journal
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
from sf_core.dataplane.sessions.memory import Memory
from sf_core.recipes.curriculum import Tasks
from sf_core.recipes.outcomes import Outcome
from storage.errors import StorageError
from storage.outcomes import read_outcomes
from storage.run_directory import RunDirectory


async def open_run(spec: RunSpec, journal: Journal, grace_s: float, memory: Memory) -> ServedRun:
    """Open a registered run, restored from its journal if that holds it. Raises ApiError if it cannot."""
    run = await reopen_run(journal, grace_s, memory, remembers=spec.rollout.curriculum is not None)
    if run is None:
        run = await _new_run(spec, journal, grace_s, memory)
    elif run.spec.origin != spec.origin:
        run = await begin_anew(run, spec)
    else:
        begin_attempt(run, spec, await read_past(run, spec))
    try:
        await journal.append(Registered(run.spec))
    except ApiError:
        run.leave_memory()
        raise
    return run


async def _new_run(
    spec: RunSpec, journal: Journal, grace_s: float, memory: Memory, remembers: bool = True
) -> ServedRun:
    """A run with the progress that `spec` states. Raises ApiError 409 if its curriculum cannot be told what
    came of earlier groups."""
    renderer = await read_renderer(spec.model_dir)
    outcomes = await _read_outcomes(spec) if remembers else []
    run = ServedRun(spec, renderer, journal, grace_s, memory)
    if outcomes:
        # nothing else has the run yet, and a large pool would hold up the other runs for seconds
        await asyncio.to_thread(_remember, run.manager.tasks, outcomes)
    return run


def _remember(tasks: Tasks, outcomes: list[Outcome]) -> None:
    tasks.observe(outcomes)
    tasks.weigh()


async def _read_outcomes(spec: RunSpec) -> list[Outcome]:
    """What came of the groups of the iterations before that of `spec`, if a curriculum goes by it. Raises
    ApiError 409 if a file is missing or broken."""
    if spec.rollout.curriculum is None:
        return []
    try:
        directory = RunDirectory(spec.run_dir)
        return await asyncio.to_thread(
            lambda: [outcome_of(row) for row in read_outcomes(directory, spec.iteration)]
        )
    except (ValueError, StorageError) as error:
        raise ApiError(
            409,
            f"the curriculum cannot be told what came of earlier groups: {error}; to go on without that, "
            "remove rollout.curriculum from the configuration, or the manifests of this iteration and "
            "of later ones",
        ) from None


async def begin_anew(run: ServedRun, spec: RunSpec) -> ServedRun:
    """Open a run whose version 0 was made again, in place of `run`, which must be released. Raises ApiError
    if it cannot be opened."""
    first = run.spec.first_attempt
    async with aclosing(run.journal.replay(read_event)) as events:
        async for event in events:
            if isinstance(event, Opened):
                claims = [opened.claim for opened in event.facts if opened.claim is not None]
                first = max([first, *(claim.attempt + 1 for claim in claims)])
    # an agent that is still at work has the name of its session, which must not be given to another one
    return await _replaced(run, spec.model_copy(update={"first_attempt": first}))


async def _replaced(run: ServedRun, spec: RunSpec) -> ServedRun:
    """A run that takes over what agents outside have finished, because it is still to be stored, and nothing
    else."""
    fresh = ServedRun(spec, await read_renderer(spec.model_dir), run.journal, run.grace_s, run.memory)
    opened = list(run.results.opened.values())
    run.leave_memory()
    for result in opened:
        fresh.results.keep_opened(result)
    return fresh


async def reopen_run(
    journal: Journal, grace_s: float, memory: Memory, remembers: bool = True
) -> ServedRun | None:
    """Restore a run from its journal; None if that holds none. Raises ApiError if it cannot be opened. Unless
    the run `remembers`, because it is to go on without a curriculum, no outcomes are read."""
    run: ServedRun | None = None
    num_applied = 0
    async with aclosing(journal.replay(read_event)) as events:
        async for event in events:
            if isinstance(event, Registered):
                spec = event.spec
                if run is None:
                    run = await _new_run(spec, journal, grace_s, memory, remembers)
                elif run.spec.origin != spec.origin:
                    run = await _replaced(run, spec)
                else:
                    begin_attempt(run, spec, await read_past(run, spec, num_applied, remembers))
            elif run is None:
                break
            else:
                run.effects.apply(event)
            num_applied += 1
    if run is not None:
        _go_on(run)
    return run


class Past(NamedTuple):
    """What a registration takes over from earlier."""

    outcomes: list[Outcome]
    """Groups that have left in iterations before the one that it states."""
    events: list[RunEvent]
    """Results, rejections, picks and claims of the journal, if the run starts over."""


async def read_past(
    run: ServedRun, spec: RunSpec, num_events: int | None = None, remembers: bool = True
) -> Past:
    """What this registration takes over, with the first `num_events` events of the journal (None: all)."""
    past = Past([], [])
    if spec.attempt < run.spec.attempt:
        return past
    starts_over = not run.knows_batch(spec.iteration)
    if remembers and (starts_over or run.spec.rollout.curriculum is None):
        past.outcomes.extend(await _read_outcomes(spec))
    return past._replace(events=await _past_events(run, spec, num_events)) if starts_over else past


async def _past_events(run: ServedRun, spec: RunSpec, num_events: int | None) -> list[RunEvent]:
    past, is_ours = list[RunEvent](), True
    async with aclosing(run.journal.replay(read_event)) as events:
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
                case Finished(result) if result.claim is not None and result.claim.place.split == "train":
                    if not result.claim.is_outside:
                        past.append(event)
    return past


def begin_attempt(run: ServedRun, spec: RunSpec, past: Past) -> bool:
    """Begin an attempt of the flow. True if the run starts over from the progress that `spec` states: then
    only `past` is taken over from the journal."""
    run.begin_attempt(spec.model_copy(update={"first_attempt": run.spec.first_attempt}))
    if run.knows_batch(spec.iteration):
        run.manager.remember(past.outcomes)
        return False
    run.forget_progress(past.outcomes)
    for event in past.events:
        if not isinstance(event, Opened):
            run.effects.apply(event)
            continue
        for opened in event.facts:
            if opened.claim is not None and not opened.claim.is_outside:
                run.manager.restore_attempt(opened.claim)
    run.manager.dropped_in_a_row.clear()
    run.note_admitted(run.manager.pick_untold())
    return True


def _go_on(run: ServedRun) -> None:
    """Let the open sessions go on, unless the run has to end."""
    run.judging.reject_halves(run.manager.groups.values())
    run.fault = run.endings.fault_of_drops()
    for session in list(run.sessions.values()):
        if session.is_external:
            continue
        if session.claim is not None and run.manager.group_of(session.claim) is None:
            run.forget(session.session_id)
        elif session.runner:
            # a runner that died meanwhile is found silent as any other
            run.runners.setdefault(session.runner, Runner(run.spec.attempt))
