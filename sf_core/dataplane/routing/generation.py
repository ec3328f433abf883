"""The generation of one turn, by any number of engines in sequence.

Owns the tokens sampled so far and what is left to request. The router decides where it runs.
"""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

from msgspec.structs import replace

from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.routing.pace import StreamPace
from sf_core.types import Chunk, FinishReason, GenerationRequest

asked_by_request: ContextVar[list[Generation] | None] = ContextVar("asked_by_request", default=None)
"""Generations submitted by the HTTP request being served, for metrics; None if nothing collects them."""

ROUNDING = 1e-3
"""Largest valid log-prob; it may exceed 0 because it is a difference of rounded numbers."""


@dataclass(frozen=True, slots=True)
class CacheHint:
    """Engine whose KV cache probably holds the beginning of a prompt."""

    engine_id: str
    version: int
    """Policy version whose weights filled this KV cache."""
    num_tokens: int


@dataclass(eq=False, frozen=True, slots=True)
class Suspicion:
    """What requests that may have ended an engine, and are tried together, have in common."""

    workers: frozenset[str]
    """Workers whose engines they may have ended. Another worker shows sooner whether a worker is at fault."""


class Generation:
    """One growing sequence of sampled tokens. After an interruption it continues from prompt + sampled ids
    with the remaining budget."""

    def __init__(self, request: GenerationRequest, *, floor: int) -> None:
        self.request = request
        """All that is asked for, as it is before the first token is sampled."""
        self.on_start: Callable[[int], None] | None = None
        """Called with the policy version of the first engine that gets it."""
        self.pace: StreamPace | None = None
        """Limits how often the reader of a stream is woken after its first tokens; None: it always is."""
        self.floor = floor
        """Oldest policy version that may continue it: versions never decrease within a turn."""
        self.token_ids: array[int] = array("i")
        self.logprobs: array[float] = array("f")
        self.versions: array[int] = array("i")
        self.engines: list[str] = []
        self.interruptions = 0
        self.num_faults = 0
        """Number of engines that it cost since its last token, which sent an invalid chunk for it, or ended
        while it was the only suspect."""
        self.suspicion: Suspicion | None = None
        """Set from the end of an engine that it may have caused until it gets a token."""
        self.finish_reason: FinishReason | None = None
        self.cancelled: str | None = None
        """Why it was cancelled; None if it was not."""
        self.refusal: ApiError | None = None
        """The error that `progress` raises; None if it was not refused."""
        self.session_id = ""
        self.num_reused = 0
        """Number of leading prompt tokens that were taken from recorded turns, not encoded."""
        self.near: CacheHint | None = None
        self.arrival: int | None = None
        """Its number in the order in which its run's requests arrived; None before it was queued."""
        self.waiting_since = 0.0
        """When it last joined the wait queue; monotonic seconds, like the times below."""
        self.submitted_at = self.started_at = self.over_at = 0.0
        """When it was submitted, first sent to an engine, and over; 0 before that."""
        self.num_prefill = self.num_decode = 0
        """Estimated tokens that its engine still has to prefill and to sample; kept by connection.py."""
        self.num_moved_at = 0
        """Its length at the last rebalancing, 0 if never rebalanced."""
        self._progress: asyncio.Future[None] | None = None
        self._num_seen = 0
        self._is_due = False
        """Its reader will be woken in the next round of its pace."""

    def comes_after(self, engine_id: str, version: int, num_tokens: int) -> None:
        """It extends this many recorded tokens, the last of them sampled by this engine with this version."""
        self.num_reused = num_tokens
        self.near = CacheHint(engine_id, version, num_tokens)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def is_over(self) -> bool:
        return self.finish_reason is not None or self.cancelled is not None or self.refusal is not None

    @property
    def num_tokens(self) -> int:
        """Length of the prompt and of the tokens sampled so far."""
        return len(self.request.prompt_ids) + len(self.token_ids)

    def ask_for_rest(self, version: int) -> GenerationRequest:
        """The rest of the generation as a request to an engine that holds this version."""
        if self.on_start is not None:
            self.on_start(version)
            self.on_start = None
        self.started_at = self.started_at or time.monotonic()
        asked = self.request
        produced = len(self.token_ids)
        return replace(
            asked,
            prompt_ids=array("i", asked.prompt_ids) + self.token_ids if produced else asked.prompt_ids,
            position=produced,
            max_tokens=asked.max_tokens - produced,
            # its first token clears a suspect
            stream=asked.stream or self.suspicion is not None,
        )

    def fault_of(self, chunk: Chunk, newest: int, num_ids: int) -> str | None:
        """Why a chunk is invalid, as a predicate whose subject is the engine; None if it is valid.

        `newest` is the version that the engine was last told to hold; ids are below `num_ids`."""
        ids = chunk.token_ids
        logprobs = chunk.logprobs
        if len(ids) != len(logprobs):
            return f"sent {len(ids)} tokens with {len(logprobs)} log-probs"
        if not ids:
            return None
        if len(self.token_ids) + len(ids) > self.request.max_tokens:
            return (
                f"sent {len(self.token_ids) + len(ids)} tokens, but at most {self.request.max_tokens} were "
                "requested"
            )
        if not 0 <= min(ids) <= max(ids) < num_ids:
            return f"sent a token id that is not from 0 to {num_ids - 1}"
        # a sum, because comparisons pass over NaN
        if not math.isfinite(sum(logprobs)) or max(logprobs) > ROUNDING:
            return "sent a log-prob that is not the logarithm of a probability"
        if not self.floor <= chunk.version <= newest:
            return f"sent tokens of version {chunk.version}; expected {self.floor} to {newest}"
        return None

    def absorb(self, chunk: Chunk, engine: str) -> bool:
        """Append newly sampled tokens; True if the turn was interrupted and must be dispatched again."""
        if chunk.token_ids:
            self.token_ids.extend(chunk.token_ids)
            self.logprobs.extend(chunk.logprobs)
            self.versions.extend([chunk.version] * len(chunk.token_ids))
            self.floor = max(self.floor, chunk.version)
            if engine not in self.engines:
                self.engines.append(engine)
        if chunk.finish_reason is FinishReason.ABORT:
            return self.interrupt(engine)
        if chunk.finish_reason is not None:
            self.finish(chunk.finish_reason)
        elif self.request.stream:
            self._wake_in_time()
        return False

    def interrupt(self, engine: str) -> bool:
        """Note that the engine samples no more of it. True if it must be dispatched again: it has budget
        left."""
        if len(self.token_ids) >= self.request.max_tokens:
            self.finish(FinishReason.LENGTH)
            return False
        self.interruptions += 1
        if len(self.versions):
            self.near = CacheHint(engine, self.versions[-1], self.num_tokens)
        if self.request.stream:
            # what was sampled may end with a stop string, and is due to the reader in any case
            self.wake()
        return True

    def finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        self.over_at = time.monotonic()
        self.wake()

    def cancel(self, reason: str) -> None:
        self.cancelled = reason
        self.over_at = time.monotonic()
        self.wake()

    def refuse(self, refusal: ApiError) -> None:
        self.refusal = refusal
        self.over_at = time.monotonic()
        self.wake()

    def end_at(self, num_tokens: int) -> None:
        """Finish after this many tokens, whose text ends with a stop string, and drop those behind them."""
        for values in (self.token_ids, self.logprobs, self.versions):
            del values[num_tokens:]
        self.finish(FinishReason.STOP)

    def wake(self) -> None:
        if self._progress is not None and not self._progress.done():
            self._progress.set_result(None)

    def _wake_in_time(self) -> None:
        """Wake the reader for new tokens: at once for the first ones, else in the next round of its pace."""
        if self.pace is None or not self._num_seen:
            self.wake()
        elif self._progress is not None and not self._is_due:
            self._is_due = True
            self.pace.soon(self._take_its_round)

    def _take_its_round(self) -> None:
        self._is_due = False
        # its reader may have been woken since, by an interruption
        if self._has_more:
            self.wake()

    @property
    def _has_more(self) -> bool:
        return self.request.stream and len(self.token_ids) > self._num_seen

    async def progress(self, num_seen: int) -> None:
        """Return when there are more tokens than `num_seen` (streams only; paced after the first ones) or the
        turn is over. Raises ApiError if the turn is refused."""
        self._num_seen = num_seen
        if not self.is_over and not (self._has_more and (self.pace is None or not num_seen)):
            self._progress = asyncio.get_running_loop().create_future()
            if self._has_more:
                self._wake_in_time()
            await self._progress
            self._progress = None
        if self.refusal is not None:
            raise self.refusal
