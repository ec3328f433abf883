"""The order of a session's requests. Each request is read and opened before the next one, even if it is large
and waits for threads. Their answers come in any order."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, nullcontext
from weakref import WeakValueDictionary


class RequestOrder:
    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def enter(self, session_id: str | None) -> AbstractAsyncContextManager[None]:
        """A context that the requests of a session enter one by one, in the order of their arrival. None: the
        request has a session of its own."""
        if session_id is None:
            return nullcontext()
        lock = self._locks.get(session_id)
        if lock is None:
            lock = self._locks[session_id] = asyncio.Lock()
        return lock
