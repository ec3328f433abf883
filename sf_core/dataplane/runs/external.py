"""Sessions of agents outside: how they are opened, and how those of no group are stored as rows of the run
directory when they have finished.

Owns which of them share a file, and that each is stored once. Until then they are in the journal
(events.py), where a restart finds them.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from contextlib import suppress
from functools import partial
from itertools import islice

from sf_core.dataplane.bodies import GroupBody, SessionBody
from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.runs.effects import compaction
from sf_core.dataplane.runs.events import Opened, Stored
from sf_core.dataplane.runs.run import ServedRun
from sf_core.dataplane.runs.sealing import write_sessions
from sf_core.dataplane.sessions.finished import FinishedSession
from sf_core.dataplane.sessions.session import Session

log = logging.getLogger(__name__)

MAX_TOGETHER = 256
"""Most sessions of a file."""

RETRY_S = 10.0
"""Seconds after a storage error in which nothing is written."""

SPARE_BYTES = 64 * 2**20
"""The journal is compacted when it has outgrown twice its size after the last compaction by this much."""


async def open_session(run: ServedRun, body: SessionBody) -> Session:
    """Open an external session, which no runner was given."""
    session_id = f"{run.spec.run_id}.open.{secrets.token_hex(8)}"
    facts = body.model_dump(include={"group", "task_id", "environment", "metadata"})
    session = Session(session_id, **facts)
    run.open(session)
    await run.journal.append(Opened.of([session]))
    return session


async def declare_group(run: ServedRun, body: GroupBody) -> list[Session]:
    """Open the sessions of a group that agents outside work on; none if there is no place for it now."""
    if known := [s for s in run.sessions.values() if body.name and s.claim and s.group == body.name]:
        return known
    give = run.manager.declare if body.split == "train" else run.manager.claim_held_out
    claims = give(body.size or run.spec.rollout.group_size)
    facts = body.model_dump(include={"task_id", "environment", "metadata"})
    run_id = run.spec.run_id
    sessions = [Session(claim.session_id(run_id), claim, group=body.name, **facts) for claim in claims]
    for session in sessions:
        run.open(session)
    if sessions:
        await run.journal.append(Opened.of(sessions))
    return sessions


class ExternalSessions:
    """Writes the external sessions of one run, one file after the other.

    A file is named after the oldest session that is not known to be stored. If the process is killed after a
    write and before its record, the next process begins with that session again and writes a file of the same
    name that holds at least the same sessions: each is in exactly one file.
    """

    def __init__(self, run: ServedRun) -> None:
        self._run = run
        self._one_at_a_time = asyncio.Lock()
        self._storing: asyncio.Task[None] | None = None
        self._retry_at = 0.0
        self._compacted_bytes = 0

    def store_soon(self) -> None:
        """Start storing; to be called periodically, so that sessions that finish in between share a file."""
        is_busy = self._storing is not None and not self._storing.done()
        if self._run.results.opened and not is_busy and time.monotonic() >= self._retry_at:
            self._storing = asyncio.ensure_future(self.store_or_try_later())

    async def store_or_try_later(self) -> None:
        try:
            await self.store()
        except (ApiError, OSError) as error:
            self._retry_at = time.monotonic() + RETRY_S
            num_waiting = len(self._run.results.opened)
            log.warning("run %s: %d opened sessions wait: %s", self._run.spec.run_id, num_waiting, error)

    async def store(self) -> None:
        """Write all finished ones. Raises ApiError or OSError; those that are not written stay."""
        async with self._one_at_a_time:
            while self._run.results.opened:
                await self._store_oldest()

    async def close(self) -> None:
        """Stop storing; returns when nothing is being written, or the journal cannot be."""
        with suppress(ApiError):
            await self._run.journal.attend(self._end())

    async def _end(self) -> None:
        async with self._one_at_a_time:
            if self._storing is not None:
                self._storing.cancel()

    async def _store_oldest(self) -> None:
        run = self._run
        run.journal.check()
        oldest = next(iter(run.results.opened.values()))
        version = _version(oldest)
        alike = (result for result in run.results.opened.values() if _version(result) == version)
        part = list(islice(alike, MAX_TOGETHER))
        await write_sessions(run, "opened", version, oldest.session_id, part)
        stored = Stored([result.session_id for result in part])
        await run.journal.append(stored)
        run.effects.apply(stored)
        if run.journal.path.stat().st_size > 2 * self._compacted_bytes + SPARE_BYTES:
            # sealing compacts too, but a run with external sessions may never seal a batch
            await run.compact(partial(compaction, run))
            self._compacted_bytes = run.journal.path.stat().st_size


def _version(result: FinishedSession) -> int:
    return result.max_version or 0
