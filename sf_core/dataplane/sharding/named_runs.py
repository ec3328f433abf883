"""The runs that the hub has named to a gateway process. Requests wait until theirs is open there, because a
restarted process first reads its journals.

Owns the order of the runs and the waiting. The runs are opened in process.py.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.sharding.forwarding import absent, refuse, session_of
from sf_core.dataplane.sharding.gateway_run import RunShard
from sf_core.dataplane.signals import Signal

OPEN_S = 30.0
"""Seconds for which a request waits for its run."""


class NamedRuns:
    def __init__(self) -> None:
        self.open: dict[str, RunShard] = {}
        """Open runs by id, in the hub's order: a request without a session goes to the last of its model."""
        self._named: dict[str, str | None] = {}
        """Ids of all runs, with the reason why opening failed; None: not tried yet, or open."""
        self._is_told = False
        self._changed = Signal()

    def name(self, *run_ids: str) -> None:
        """Note that the hub has these runs."""
        for run_id in run_ids:
            self._named.setdefault(run_id, None)
        self._is_told = True
        self._changed.notify()

    def add(self, run: RunShard) -> None:
        """Note that a run is open."""
        self.open[run.spec.run_id] = run
        for run_id in self._named:
            if run_id in self.open:
                self.open[run_id] = self.open.pop(run_id)
        self._changed.notify()

    def remove(self, run_id: str) -> RunShard | None:
        """Forget a run that the hub no longer has. Returns it if it was open."""
        self._named.pop(run_id, None)
        self._changed.notify()
        return self.open.pop(run_id, None)

    def note_failure(self, run_id: str, reason: str) -> None:
        """Note why a run could not be opened; the hub asks again."""
        self._named[run_id] = reason
        self._changed.notify()

    @property
    def are_open(self) -> bool:
        """Whether all runs of the hub are known and open."""
        return self._is_told and self.open.keys() == self._named.keys()

    async def wait_for(self, session_id: str | None) -> None:
        """Return when the run of this session is open, or the hub has no run that it could belong to; without
        a session, when every run was tried. Raises ApiError 503 if that takes too long."""
        if await self._changed.until(lambda: self._is_told and not self._awaited(session_id), OPEN_S):
            return
        reasons = [reason for reason in self._awaited(session_id).values() if reason is not None]
        raise absent(f"has not opened it within {OPEN_S:g} s{': ' if reasons else ''}{' '.join(reasons)}")

    def _awaited(self, session_id: str | None) -> dict[str, str | None]:
        """The runs to wait for, as in `_named`."""
        missing = {name: reason for name, reason in self._named.items() if name not in self.open}
        if session_id is None:
            return {name: reason for name, reason in missing.items() if reason is None}
        return {name: reason for name, reason in missing.items() if session_id.startswith(f"{name}.")}


class Opening:
    """ASGI middleware that holds requests back until their run is open."""

    def __init__(self, app: ASGIApp, runs: NamedRuns, key: str | None) -> None:
        self._app, self._runs, self._key = app, runs, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._runs.are_open:
            try:
                await self._runs.wait_for(session_of(scope, self._key))
            except ApiError as error:
                return await refuse(error, scope, receive, send)
        await self._app(scope, receive, send)
