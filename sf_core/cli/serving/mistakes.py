"""What went wrong in the user's code: the user's own frames, and one sentence with phase, file and line. Code
that keeps the event loop from turning is ended: with it, no other session of a worker would go on.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from traceback import FrameSummary, TracebackException, walk_stack
from types import FrameType
from typing import Any

from sf_core.agents import event_loop
from sf_core.agents.phases import Phase
from sf_core.process.user_code import is_own, own_place, place_of
from sf_core.types import Endpoint


class BlockedError(BaseException):
    """Raised in the user's code that blocks. No `except Exception` of that code can hide it."""


@asynccontextmanager
async def not_blocking() -> AsyncIterator[None]:
    """Raise BlockedError in the user's code that blocks the loop of the main thread."""
    thread = threading.get_ident()
    before = signal.signal(signal.SIGALRM, _interrupt)
    try:
        # a signal also ends a call that waits in the kernel
        with event_loop.watch_for_blocks(lambda frame: signal.pthread_kill(thread, signal.SIGALRM)):
            yield
    finally:
        signal.signal(signal.SIGALRM, before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if frame is not None and any(is_own(at.f_code.co_filename) for at, _ in walk_stack(frame)):
        raise BlockedError(
            f"the agent blocked the event loop for {event_loop.BLOCKED_S:g} s: await the slow call, or "
            "remove `async` from the agent, so that it runs in a thread"
        )


_PHASES: dict[Phase, str] = {
    "tasks": "the agent",
    "prepare": "environment.prepare",
    "agent": "the agent",
    "reward": "the reward",
}


class NothingAskedError(Exception):
    """The agent ended without an answer from the policy."""


class PhaseError(Exception):
    """A phase of a session failed; its cause is what was raised."""

    def __init__(self, phase: str, error: BaseException, function: Callable[..., Any] | None = None) -> None:
        super().__init__(phase)
        self.phase = phase
        self.error = error
        self._function = function

    def sentence(self) -> str:
        """Phase, file and line, type and message of the error."""
        text = str(self.error)
        if not (self._is_ours and text):
            text = f"{type(self.error).__name__}: {text}"
        return f"{self.phase} failed{self._where()}: {text}"

    def facts(self) -> dict[str, str]:
        """The error for programs."""
        return {
            "phase": self.phase,
            "type": type(self.error).__name__,
            "message": self.sentence(),
            "place": own_place(self.error),
            "traceback": self.traceback(),
        }

    def traceback(self) -> str:
        """The traceback of the user's own frames; empty if none of them was running."""
        lines = _without_others(TracebackException.from_exception(self.error))
        # what errors of ours say is in the sentence
        return "".join(lines[:-1] if self._is_ours else lines)

    @property
    def _is_ours(self) -> bool:
        return type(self.error).__module__.startswith("sf_core.")

    def _where(self) -> str:
        if place := own_place(self.error):
            return f" at {place}"
        defined = place_of(self._function) if self._function else ""
        return f" ({defined})" if is_own(defined.rpartition(":")[0]) else ""


def name_phase(phase: Phase) -> str:
    """The part of the run that an error in this phase comes from, in words."""
    return _PHASES[phase]


def explain_silence(endpoint: Endpoint) -> str:
    """That an agent did not use its endpoint, and how it must."""
    return (
        "the agent got no answer from the policy, and a session without an answer cannot train: the "
        f"agent's client must use endpoint.base_url ({endpoint.base_url}), endpoint.api_key and "
        "endpoint.model"
    )


def _users_frames(trace: TracebackException) -> list[FrameSummary]:
    return [frame for frame in trace.stack if is_own(frame.filename)]


def _without_others(trace: TracebackException) -> list[str]:
    """The traceback with the user's frames only; causes in which no code of the user ran are left out."""
    if not _users_frames(trace):
        return []
    part: TracebackException | None = trace
    while part is not None:
        part.stack[:] = _users_frames(part)
        before = part.__cause__ or (None if part.__suppress_context__ else part.__context__)
        if before is None or not _users_frames(before):
            part.__cause__ = part.__context__ = None
            break
        part = before
    return list(trace.format())
