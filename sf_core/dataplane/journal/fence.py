"""Asks the run directory whether a later attempt of a run has begun, perhaps at another data plane.

A data plane that owns the journal in the run directory need not ask: no other plane can have opened the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sf_core.dataplane.errors import RETRY_AFTER_S, ApiError
from storage.errors import StorageError

ANSWER_S = 30.0
"""Seconds in which the storage must answer."""


class Fence:
    """Asks one question at a time, in a thread. Callers during a question share the next one, because the
    answer must be newer than their call."""

    def __init__(self, is_superseded: Callable[[], bool]) -> None:
        self._is_superseded = is_superseded
        self._asking: asyncio.Future[bool] | None = None
        self._next: asyncio.Future[bool] | None = None

    async def is_superseded(self) -> bool:
        """Whether a later attempt has begun, by a question that began after this call. Raises ApiError 503 if
        the storage does not answer."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._ask())
        try:
            return await asyncio.wait_for(asyncio.shield(self._next), ANSWER_S)
        except (StorageError, TimeoutError) as error:
            raise ApiError(
                503,
                "The data plane cannot read from the run directory whether a later attempt of the run has "
                f"begun: {error or 'the storage does not answer'}. Send this request again.",
                code="attempt_unknown",
                retry_after_s=RETRY_AFTER_S,
            ) from None

    async def _ask(self) -> bool:
        if self._asking is not None:
            await asyncio.wait([self._asking])
        self._asking = self._next
        self._next = None
        return await asyncio.to_thread(self._is_superseded)
