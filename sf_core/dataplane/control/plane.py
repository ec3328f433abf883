"""All runs of one data plane: their registration, and the commands of flows.

Owns the map of runs and the once-a-second sweep. Speaks no HTTP (app.py).
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from sf_core.dataplane.api_schemas import FinishBody, GroupBody, RunSpec, SessionBody
from sf_core.dataplane.errors import RETRY_AFTER_S, ApiError, EngineFailed, WrongField
from sf_core.dataplane.gateway.access import Caller, Lookup, no_model
from sf_core.dataplane.journal.journal import Journal
from sf_core.dataplane.journal.ownership import Fence, OpenRuns, Owner
from sf_core.dataplane.options import DataplaneOptions
from sf_core.dataplane.routing.connection import EngineConnection
from sf_core.dataplane.runs.claiming import declare_group, open_session, take_from_silent_runners
from sf_core.dataplane.runs.endings import end_expired, finish
from sf_core.dataplane.runs.recovery import begin_anew, begin_attempt, open_run, reopen_run
from sf_core.dataplane.runs.run import ServedRun
from sf_core.dataplane.runs.sealing import ExternalSessions, Sealer
from sf_core.dataplane.sessions.claims import run_of
from sf_core.dataplane.sessions.memory_budget import MemoryBudget
from sf_core.dataplane.sessions.session import Session
from sf_core.types import WeightsRef
from storage.errors import StorageError
from storage.run_directory import RunDirectory

log = logging.getLogger(__name__)

SWEEP_S = 1.0

LET_GO_S = 600.0
"""Seconds after which a released idle run is no longer served; registered again, its journal restores it."""


class DataPlane:
    def __init__(self, options: DataplaneOptions) -> None:
        """A journal directory lets `reopen` serve again the runs that were open when the last process there
        ended. Raises ValueError if another data plane uses the directory."""
        self.runs: dict[str, ServedRun] = {}
        self.sealers: dict[str, Sealer] = {}
        self.stores: dict[str, ExternalSessions] = {}
        self.sessions = Lookup(self.runs)
        self.memory = MemoryBudget(options.memory_mb)
        self.owner = Owner(journal_dir=options.journal_dir or "")
        """This data plane, as others are told of it whose runs it has open."""
        self._options = options
        self._open_runs = None if options.journal_dir is None else OpenRuns(Path(options.journal_dir))
        self._registering = asyncio.Lock()
        self._background: set[asyncio.Task[None]] = set()
        self._over_s: dict[str, float] = {}
        """Seconds for which a run has been over, by its id."""

    async def reopen(self) -> None:
        """Serve again the runs that an earlier process served."""
        for path in self._open_runs.journals if self._open_runs else ():
            journal = Journal(path, self._options.fsync, self.owner)
            try:
                run = await reopen_run(journal, self._options.grace_s, self.memory)
                if run is not None:
                    await run.refuse_taken_over()
                    self._serve(run)
                    continue
            except Exception as error:  # the other runs are to be served
                log.warning(
                    "%s: the run cannot be served: %s: %s. Fix the cause, then start the flow of the run "
                    "again",
                    path,
                    type(error).__name__,
                    error,
                    exc_info=not isinstance(error, (ApiError, OSError)),
                )
            await journal.close()

    async def register(self, spec: RunSpec) -> ServedRun:
        """Open a run, or begin another attempt on it."""
        async with self._registering:
            # an old flow must not take the journal from a newer one that works elsewhere
            if await Fence(lambda: _open_directory(spec).is_superseded(spec.attempt)).is_superseded():
                raise ApiError.superseded(spec.run_id, spec.attempt)
            run = self.runs.get(spec.run_id)
            if run is not None and not await run.journal.resume():
                # another data plane had it meanwhile, and its journal holds more than this one knows
                await self._let_go(run)
                run = None
            if run is None:
                run = await self._open(spec)
            else:
                if run.spec.origin != spec.origin:
                    run = await self._begin_anew(run, spec)
                elif await begin_attempt(run, spec):
                    self.sealers[spec.run_id].forget()
                await run.journal.await_unless_failing(run.journal.flush())
                stale = [engine for engine in run.router.engines if engine.attempt < spec.attempt]
                self._take_away(stale, run, "superseded by a later attempt of the flow")
            run.journal.set_attempt(spec.attempt)
            if self._open_runs is not None:
                self._open_runs.add(spec.run_id, run.journal.path)
            return run

    async def _open(self, spec: RunSpec) -> ServedRun:
        journal = self._open_journal(spec)
        try:
            run = await journal.await_unless_failing(
                open_run(spec, journal, self._options.grace_s, self.memory)
            )
        except BaseException:
            await journal.close()
            raise
        self._serve(run)
        return run

    async def _begin_anew(self, run: ServedRun, spec: RunSpec) -> ServedRun:
        if spec.attempt < run.spec.attempt:
            raise ApiError.superseded(spec.run_id, spec.attempt)
        run.release()
        self._take_away(list(run.router.engines), run, "the run starts again")
        await self.stores[spec.run_id].close()
        fresh = await begin_anew(run, spec)
        self._serve(fresh)
        return fresh

    def _serve(self, run: ServedRun) -> None:
        run.turns.note_failed = partial(self._note_failed, run)
        run.journal.set_attempt(run.spec.attempt)
        self.runs[run.spec.run_id] = run
        self.sealers[run.spec.run_id] = Sealer(run)
        self.stores[run.spec.run_id] = ExternalSessions(run)

    def run(self, run_id: str) -> ServedRun:
        if (run := self.runs.get(run_id)) is None:
            raise ApiError(404, f"Run {run_id} is not registered at this data plane.", code="run_not_found")
        return run

    def find_session(self, session_id: str, caller: Caller) -> tuple[ServedRun, Session]:
        """An open session that the caller may read, reward and finish, and its run. Raises ApiError as
        `Lookup.owned_session` does, and 503 while the end of such a session is being recorded."""
        run = self.runs.get(run_of(session_id))
        if run is not None and session_id not in run.sessions and (session := run.closing.get(session_id)):
            if not caller.owns(run.spec, session):
                raise caller.refusal()
            run.closing.check(session_id)
        return self.sessions.owned_session(session_id, caller)

    def find_ended(self, session_id: str, caller: Caller) -> ServedRun | None:
        """The run whose session of this id has ended, if the caller may report on it; None if it may not, or
        the session has not ended."""
        run = self.runs.get(run_of(session_id))
        if run is None or session_id in run.sessions:
            return None
        is_own = run.state.ends.is_external(session_id) and caller.is_client_of(run.spec)
        return run if caller.is_operator or is_own else None

    async def open_session(self, body: SessionBody, caller: Caller) -> Session:
        """Open an external session, beside those that the rollout manager gives out. Raises ApiError as
        `_open_run` does."""
        run = self._open_run(body.run_id, caller)
        if body.policy not in (None, run.spec.served_model):
            raise no_model(str(body.policy))
        return await run.journal.await_unless_failing(open_session(run, body, caller.is_operator))

    async def declare(self, run_id: str, body: GroupBody, caller: Caller) -> list[Session]:
        """Open the sessions of an external group. Raises ApiError 429 while no batch has a place for it,
        409 if the run takes none, else as `_open_run` does."""
        run = self._open_run(run_id, caller)
        if body.split == "train" and not run.spec.rollout.outside_groups:
            raise _takes_no_groups(run_id)
        if sessions := await run.journal.await_unless_failing(declare_group(run, body, caller.is_operator)):
            return sessions
        raise _no_place(run, body)

    def _open_run(self, run_id: str, caller: Caller) -> ServedRun:
        """A run in which sessions can be opened. Raises ApiError 503 while no flow works on it, because one
        may be starting, 429 while memory is full, 404 once it is complete, and 401 if the caller is no client
        of the run."""
        run = self.runs.get(run_id)
        is_client = caller.is_welcome or caller.is_operator if run is None else caller.is_client_of(run.spec)
        if not is_client:
            raise caller.refusal()
        if run is None:
            raise _not_served(run_id)
        if run.released:
            raise _complete(run) if run.is_complete else _not_served(run_id)
        if self.memory.is_full:
            raise _no_room(self.memory)
        run.refuse_superseded()
        run.journal.check()
        return run

    async def publish(self, run: ServedRun, weights: WeightsRef) -> dict[str, Any]:
        if weights.version < run.router.weights.version:
            raise ApiError(409, f"Version {run.router.weights.version} is already published.")
        started = time.monotonic()
        versions = await run.publish(weights)
        engines = run.router.engines
        held = {e.first_version if e.version is None else e.version for e in engines}
        return {
            "engines": versions,
            "refusals": [engine.refusal_reason for engine in engines if engine.refusal_reason],
            "held": sorted(held),
            "seconds": time.monotonic() - started,
        }

    async def revoke(self, run: ServedRun, lease_id: str, within_s: float | None = None) -> dict[str, int]:
        """Have the engines of a lease yield. Returns how many left, and how many of them were dropped because
        they had not yielded in time. An engine of the lease that connects later is turned away."""
        await run.revoke(lease_id)
        engines = [engine for engine in run.router.engines if engine.lease_id == lease_id]
        leaving = [asyncio.ensure_future(run.router.revoke(engine, "revoked")) for engine in engines]
        if leaving:
            await asyncio.wait(leaving, timeout=within_s)
        late = [engine for engine in engines if not engine.disconnected.is_set()]
        for engine in late:
            log.warning("engine %s did not yield within %g s and is dropped", engine.engine_id, within_s)
            run.router.disconnect(engine)
        run.counters["engines_dropped"] += len(late)
        await asyncio.gather(*leaving)
        return {"engines": len(engines), "dropped": len(late)}

    async def release(self, run: ServedRun) -> None:
        run.release()
        try:
            await run.journal.flush()
        finally:
            self._take_away(list(run.router.engines), run, "released")
        await self.stores[run.spec.run_id].store_or_try_later()
        # a run with results that are not written yet is for the next process too
        if self._open_runs is not None and not run.state.results.external:
            self._open_runs.remove(run.spec.run_id)
        await self._rest(run)

    async def _rest(self, run: ServedRun) -> None:
        """Let another data plane have a run that no flow works on."""
        if run.is_at_rest and not self._registering.locked():
            with suppress(ApiError):
                await run.journal.await_unless_failing(run.journal.release())

    async def sweep(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(SWEEP_S)
            now = time.monotonic()
            # while this process stood still, it could hear no runner, and none could work
            last, elapsed = now, min(now - last, 2 * SWEEP_S)
            for run in list(self.runs.values()):
                try:
                    with suppress(ApiError):
                        await run.journal.await_unless_failing(sweep_run(run, elapsed))
                    if run.journal.is_lost:
                        self._take_away(list(run.router.engines), run, "another data plane has the run")
                    else:
                        self.stores[run.spec.run_id].store_soon()
                    await self._rest(run)
                    await self._let_go_if_over(run, elapsed)
                except Exception:
                    # the next sweep tries again, and the other runs must not go without one
                    log.exception("regular checks of run %s failed", run.spec.run_id)

    async def _let_go_if_over(self, run: ServedRun, elapsed_s: float) -> None:
        run_id = run.spec.run_id
        over_s = self._over_s.pop(run_id, 0.0) + elapsed_s
        if not run.is_over:
            return
        if over_s <= LET_GO_S or self._registering.locked():
            self._over_s[run_id] = over_s
            return
        async with self._registering:
            # first, because it writes: on a full disk the run stays as it is
            if self._open_runs is not None:
                self._open_runs.remove(run_id)
            await self._let_go(run)

    async def _let_go(self, run: ServedRun) -> None:
        run_id = run.spec.run_id
        del self.runs[run_id], self.sealers[run_id]
        self._take_away(list(run.router.engines), run, "the run is served elsewhere")
        await self.stores.pop(run_id).close()
        await run.leave()

    async def close(self) -> None:
        for store in self.stores.values():
            await store.close()
        for run in self.runs.values():
            await run.journal.close()
        if self._open_runs is not None:
            self._open_runs.close()

    def _take_away(self, engines: list[EngineConnection], run: ServedRun, reason: str) -> None:
        for engine in engines:
            self._begin(run.router.revoke(engine, reason))

    def _note_failed(self, run: ServedRun, session: Session, error: EngineFailed) -> None:
        told = run.state.recent.last_error = f"session {session.session_id}: {error.message}"
        # a session that a client opened stays open until the client finishes it
        if error.is_poison and session.claim is not None:
            self._begin(_end_poisoned(run, session, told))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._note_ended)

    def _note_ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("work that nobody awaits failed: %s", error, exc_info=error)

    def _open_journal(self, spec: RunSpec) -> Journal:
        directory = _open_directory(spec)
        if directory.is_local:
            folder = directory.journal_dir
        else:
            # remote filesystems do not append; this directory survives the process, as a journal must
            folder = self._options.journal_dir or str(Path(tempfile.gettempdir()) / "seamlessflow")
        return Journal(Path(folder) / f"{spec.run_id}.journal", self._options.fsync, self.owner)


def _open_directory(spec: RunSpec) -> RunDirectory:
    """Raises WrongField if no such storage is known."""
    try:
        return RunDirectory(spec.run_dir)
    except StorageError as error:
        raise WrongField("run_dir", f"run_dir: {error}") from None


async def _end_poisoned(run: ServedRun, session: Session, error: str) -> None:
    """End a session whose request ends engines, so that it is not repeated with the same draws."""
    report = FinishBody.model_validate({"status": "failed", "cause": "code", "error": error})
    try:
        await finish(run, session, report)
    except Exception as raised:
        log.warning("run %s: session %s: %s", run.spec.run_id, session.session_id, raised)


async def sweep_run(run: ServedRun, elapsed_s: float) -> None:
    """Look after the router, silent runners and sessions that run too long; called once a second."""
    run.router.enforce_limits()
    run.pass_time(elapsed_s)
    take_from_silent_runners(run, elapsed_s)
    await end_expired(run)


def _not_served(run_id: str) -> ApiError:
    message = (
        f"No run named {run_id} is served now: if its flow is starting, sessions can be opened after the "
        "warm start; otherwise check the name of the run and the address of this data plane."
    )
    return ApiError(503, message, code="run_not_served", param="run_id", retry_after_s=RETRY_AFTER_S)


def _no_room(memory: MemoryBudget) -> ApiError:
    message = (
        f"No session can be opened now, because the data plane is at its memory limit ({memory}): try again "
        "later, or start the data plane with more --memory-mb."
    )
    return ApiError(429, message, code="memory_full", retry_after_s=RETRY_AFTER_S)


def _takes_no_groups(run_id: str) -> ApiError:
    message = (
        f"Run {run_id} takes no external groups, because rollout.outside_groups is 0: set "
        "rollout.outside_groups, or open sessions; opened sessions are stored but do not train."
    )
    return ApiError(409, message, code="no_outside_groups", param="run_id")


def _no_place(run: ServedRun, body: GroupBody) -> ApiError:
    message = (
        f"Run {run.spec.run_id} cannot take another external group within the lag bound now: declare "
        "the group again later."
        if body.split == "train"
        else f"No evaluation of run {run.spec.run_id} has a held-out task left: ask again later."
    )
    return ApiError(429, message, code="no_place", retry_after_s=RETRY_AFTER_S)


def _complete(run: ServedRun) -> ApiError:
    message = f"Run {run.spec.run_id} has ended: all {run.spec.num_batches} iterations are done."
    return ApiError(404, message, code="run_over", param="run_id")
