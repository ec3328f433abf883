"""All runs of one data plane: registration, lookup, and the commands flows give.

Owns the map of runs and the once-a-second sweep. Speaks no HTTP (app.py).
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import time
from pathlib import Path
from typing import Any

from starlette.types import Scope

from sf_core.dataplane.batches import Sealer
from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.journal import Journal
from sf_core.dataplane.keys import Caller, wrong_key
from sf_core.dataplane.links import EngineLink
from sf_core.dataplane.run import Run, read_renderer
from sf_core.dataplane.session import Session
from sf_core.dataplane.specs import FinishBody, RunSpec, SessionBody
from sf_core.types import WeightsRef
from storage.files import is_local
from storage.run_directory import RunDirectory

SWEEP_S = 1.0


class DataPlane:
    def __init__(self, journal_dir: str | None = None) -> None:
        self.runs: dict[str, Run] = {}
        self.sealers: dict[str, Sealer] = {}
        self.opened: dict[str, tuple[Run, Session]] = {}
        """Sessions that were asked for by name of their run, until they are finished."""
        self._journal_dir = journal_dir
        self._registering = asyncio.Lock()
        self._background: set[asyncio.Task[None]] = set()
        self._ad_hoc_count = 0

    async def register(self, spec: RunSpec) -> Run:
        """Open a run, or begin another attempt on it."""
        async with self._registering:
            if (run := self.runs.get(spec.run_id)) is None:
                journal = self._open_journal(spec)
                run = self.runs[spec.run_id] = Run(spec, await read_renderer(spec.model_dir), journal)
                self.sealers[spec.run_id] = Sealer(run)
                run.restore(await asyncio.to_thread(journal.replay))
                return run
            run.begin_attempt(spec)
            stale = [link for link in run.router.links if link.attempt < spec.attempt]
            self._take_away(stale, run, "superseded by a later attempt of the flow")
            if run.knows_batch(spec.iteration):
                run.manager.rules = spec.rules
            else:
                run.forget_progress()
                self.sealers[spec.run_id].forget()
                run.restore(await asyncio.to_thread(run.journal.replay))
            return run

    def run(self, run_id: str) -> Run:
        if (run := self.runs.get(run_id)) is None:
            raise ApiError(404, f"Run {run_id} is not registered here.", code="run_not_found")
        return run

    def find_session(self, scope: Scope, model: str) -> tuple[Run, Session]:
        """Without a session id a fresh ad-hoc session of the newest run that serves this model."""
        caller: Caller = scope["caller"]
        session_id = caller.session_id(scope)
        if session_id is None:
            for run in reversed(self.runs.values()):
                if run.spec.served_model == model and caller.may_use(run):
                    self._ad_hoc_count += 1
                    return run, Session(f"{run.spec.run_id}.adhoc.{self._ad_hoc_count}")
            raise _no_model(model)
        run, session = self.session(session_id, caller)
        if model != run.spec.served_model:
            raise _no_model(model)
        return run, session

    def session(self, session_id: str, caller: Caller) -> tuple[Run, Session]:
        if (opened := self.opened.get(session_id)) is not None:
            return self._allowed(opened[0], caller), opened[1]
        for run in self.runs.values():
            if (session := run.sessions.get(session_id)) is not None:
                return self._allowed(run, caller), session
        raise ApiError(404, f"Session {session_id} is unknown or over.", code="session_not_found")

    def served_models(self, session_id: str | None, caller: Caller) -> list[str]:
        runs = self.runs.values() if session_id is None else [self.session(session_id, caller)[0]]
        return sorted({run.spec.served_model for run in runs if caller.may_use(run)})

    def open_session(self, body: SessionBody, caller: Caller) -> Session:
        """A session beside those the rollout manager gives out; it never trains."""
        run = self._allowed(self.run(body.run_id), caller)
        session = Session(
            f"{body.run_id}.open.{secrets.token_hex(8)}",
            expires_at=run.serving_s + run.spec.session_timeout_s,
            task_id=body.task_id,
            metadata=body.metadata,
        )
        self.opened[session.session_id] = (run, session)
        return session

    async def finish(self, run: Run, session: Session, body: FinishBody) -> None:
        """A reward the session was given before counts where the report has none."""
        if body.reward is None and session.reward is not None and body.status == "finished":
            body = body.model_copy(
                update={
                    "reward": session.reward,
                    "reward_parts": {**session.reward_parts, **body.reward_parts},
                }
            )
        if session.claim is not None:
            return await run.finish(session, body)
        self._close(run, session, "the session is over")

    async def publish(self, run: Run, weights: WeightsRef) -> dict[str, Any]:
        if weights.version < run.router.weights.version:
            raise ApiError(409, f"Version {run.router.weights.version} is published already.")
        started = time.monotonic()
        engines = await run.router.update(weights)
        run.manager.set_version(weights.version)
        run.changed.notify()
        return {"engines": engines, "seconds": time.monotonic() - started}

    async def revoke(self, run: Run, lease_id: str) -> int:
        """Returns how many engines yielded. A lease that has not come yet is turned away when it does."""
        run.revoked_leases.add(lease_id)
        links = [link for link in run.router.links if link.lease_id == lease_id]
        await asyncio.gather(*(run.router.take_away(link, "revoked") for link in links))
        return len(links)

    def release(self, run: Run) -> None:
        run.release()
        for of_run, session in list(self.opened.values()):
            if of_run is run:
                self._close(run, session, "the run was released")
        self._take_away(list(run.router.links), run, "released")

    async def sweep(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(SWEEP_S)
            last, elapsed = time.monotonic(), time.monotonic() - last
            for run in list(self.runs.values()):
                await run.sweep(elapsed)
            for run, session in list(self.opened.values()):
                if session.expires_at < run.serving_s:
                    self._close(run, session, "the session ran too long")

    def _close(self, run: Run, session: Session, reason: str) -> None:
        self.opened.pop(session.session_id, None)
        for generation in list(session.running):
            run.router.cancel(generation, reason)

    def _allowed(self, run: Run, caller: Caller) -> Run:
        if not caller.may_use(run):
            raise wrong_key()
        return run

    async def close(self) -> None:
        for run in self.runs.values():
            await run.journal.close()

    def _take_away(self, links: list[EngineLink], run: Run, reason: str) -> None:
        for link in links:
            task = asyncio.ensure_future(run.router.take_away(link, reason))
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    def _open_journal(self, spec: RunSpec) -> Journal:
        if is_local(spec.run_dir):
            folder = RunDirectory(spec.run_dir).journal_dir
        else:
            # remote filesystems do not append; the directory survives the process, which is what it is for
            folder = self._journal_dir or str(Path(tempfile.gettempdir()) / "seamlessflow")
        return Journal(Path(folder) / f"{spec.run_id}.journal")


def _no_model(model: str) -> ApiError:
    return ApiError(404, f"The model {model!r} does not exist here.", code="model_not_found", param="model")
