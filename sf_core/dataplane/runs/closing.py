"""Sessions that somebody has ended, until the journal holds it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sf_core.dataplane.errors import RETRY_AFTER_S, ApiError
from sf_core.dataplane.sessions.session import Session


class Closing(dict[str, Session]):
    """By id."""

    def check(self, session_id: str) -> None:
        """Raises ApiError 503 for one of them: who reports its end again must not be told that there is none,
        nor that it is recorded."""
        if session_id in self:
            raise ApiError(
                503,
                f"The end of session {session_id} is being recorded: send this again.",
                code="being_recorded",
                retry_after_s=RETRY_AFTER_S,
            )

    @contextmanager
    def holding(self, session: Session) -> Iterator[None]:
        """Raises ApiError as `check` does."""
        self.check(session.session_id)
        self[session.session_id] = session
        try:
            yield
        finally:
            del self[session.session_id]
