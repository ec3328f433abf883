"""The generation of one turn, by any number of engines in sequence, and the pace at which its tokens are
passed on.

Owns the tokens sampled so far and the remaining request. The router decides where the generation runs.

The pace bounds the events that a run sends per second, however much it samples: an event costs the same for
one token as for ten. While streams are few, every token is sent as it comes; when they are many, one event
carries the tokens of several engine steps.
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
from sf_core.types import Chunk, FinishReason, GenerationRequest

EVENT_S = 1 / 8000
"""Seconds that each event adds to a round: 8 streams have an event per millisecond, 256 one in 32 ms each."""


class StreamPace:
    """Wakes the readers of streams in rounds. A round begins at once, but at the earliest `event_s` per event
    after the previous round began: a few streams never wait."""

    def __init__(self, event_s: float = EVENT_S) -> None:
        self._event_s = event_s
        self._due: list[Callable[[], None]] = []
        self._next_at = 0.0

    def wake_in_next_round(self, wake: Callable[[], None]) -> None:
        """Call `wake` in the next round."""
        if not self._due:
            loop = asyncio.get_running_loop()
            if loop.time() < self._next_at:
                loop.call_at(self._next_at, self._run_round)
            else:
                loop.call_soon(self._run_round)
        self._due.append(wake)

    def _run_round(self) -> None:
        due = self._due
        self._due = []
        self._next_at = asyncio.get_running_loop().time() + self._event_s * len(due)
        for wake in due:
            wake()


submitted_by_request: ContextVar[list[Generation] | None] = ContextVar("asked_by_request", default=None)
"""Generations submitted by the HTTP request being served, for metrics; None if nothing collects them."""

MAX_LOGPROB = 1e-3
"""Largest valid log-prob. It may exceed 0, because it is a difference of rounded numbers."""


@dataclass(frozen=True, slots=True)
class CacheHint:
    """Engine whose KV cache probably holds the beginning of a prompt."""

    engine_id: str
    version: int
    """Policy version whose weights filled this KV cache."""
    num_tokens: int


@dataclass(eq=False, frozen=True, slots=True)
class Suspicion:
    """A set of requests that may have ended an engine, and are tried together."""

    workers: frozenset[str]
    """Workers whose engines the requests may have ended. A trial on another worker shows sooner whether a
    worker is at fault."""


class Generation:
    """One growing sequence of sampled tokens. After an interruption it continues from prompt + sampled ids
    with the remaining budget."""

    def __init__(self, request: GenerationRequest, *, floor: int) -> None:
        self.request = request
        """The whole request, as it is before the first token is sampled."""
        self.on_start: Callable[[int], None] | None = None
        """Called with the policy version of the first engine that gets the generation."""
        self.pace: StreamPace | None = None
        """Limits how often the reader of a stream is woken after its first tokens; None: at every chunk."""
        self.floor = floor
        """Oldest policy version that may continue the generation: versions never decrease within a turn."""
        self.token_ids: array[int] = array("i")
        self.logprobs: array[float] = array("f")
        self.versions: array[int] = array("i")
        self.engines: list[str] = []
        self.interruptions = 0
        self.num_faults = 0
        """Number of engines lost since the last token: engines that sent an invalid chunk for this
        generation, or that ended while it was the only suspect."""
        self.suspicion: Suspicion | None = None
        """Set from the end of an engine, which this generation may have caused, until the next token."""
        self.finish_reason: FinishReason | None = None
        self.cancelled: str | None = None
        """Why the generation was cancelled; None if it was not."""
        self.refusal: ApiError | None = None
        """The error that `progress` raises; None if the generation was not refused."""
        self.session_id = ""
        self.num_reused = 0
        """Number of leading prompt tokens that were taken from recorded turns, not encoded."""
        self.cache_hint: CacheHint | None = None
        self.arrival: int | None = None
        """Number in the order of arrival at the router of the run; None before it was queued."""
        self.waiting_since = 0.0
        """When the generation last joined the wait queue; monotonic seconds, like the times below."""
        self.submitted_at = 0.0
        self.started_at = 0.0
        """When the generation was first sent to an engine."""
        self.over_at = 0.0
        """When the generation finished, or was cancelled or refused."""
        self.num_prefill = 0
        self.num_decode = 0
        """Estimated tokens that the engine still has to prefill and to sample; updated by connection.py."""
        self.num_moved_at = 0
        """Length at the last rebalancing; 0 if never rebalanced."""
        self._progress: asyncio.Future[None] | None = None
        self._num_seen = 0
        """Number of tokens that the reader has seen."""
        self._is_wake_scheduled = False
        """Whether the reader will be woken in the next round of the pace."""

    def set_parent(self, engine_id: str, version: int, num_tokens: int) -> None:
        """Set the parent turn: the prompt begins with `num_tokens` recorded tokens, of which this engine
        sampled the last with this policy version."""
        self.num_reused = num_tokens
        self.cache_hint = CacheHint(engine_id, version, num_tokens)

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

    def remaining_request(self, version: int) -> GenerationRequest:
        """The rest of the generation, as a request to an engine with this policy version."""
        if self.on_start is not None:
            self.on_start(version)
            self.on_start = None
        self.started_at = self.started_at or time.monotonic()
        whole = self.request
        num_sampled = len(self.token_ids)
        return replace(
            whole,
            prompt_ids=array("i", whole.prompt_ids) + self.token_ids if num_sampled else whole.prompt_ids,
            position=num_sampled,
            max_tokens=whole.max_tokens - num_sampled,
            # the first token clears a suspect, so it must come at once
            stream=whole.stream or self.suspicion is not None,
        )

    def validate(self, chunk: Chunk, newest: int, num_ids: int) -> str | None:
        """Why a chunk is invalid, as a predicate whose subject is the engine; None if it is valid.

        `newest` is the policy version that the engine was last sent; ids are below `num_ids`."""
        ids = chunk.token_ids
        logprobs = chunk.logprobs
        if len(ids) != len(logprobs):
            return f"sent {len(ids)} tokens with {len(logprobs)} log-probs"
        if not ids:
            return None
        num_tokens = len(self.token_ids) + len(ids)
        if num_tokens > self.request.max_tokens:
            return f"sent {num_tokens} tokens, but at most {self.request.max_tokens} were requested"
        if not 0 <= min(ids) <= max(ids) < num_ids:
            return f"sent a token id that is not from 0 to {num_ids - 1}"
        # the sum is NaN if one of them is; min and max may skip NaN
        if not math.isfinite(sum(logprobs)) or max(logprobs) > MAX_LOGPROB:
            return "sent a log-prob that is not the logarithm of a probability"
        if not self.floor <= chunk.version <= newest:
            return f"sent tokens of version {chunk.version}; expected {self.floor} to {newest}"
        return None

    def append(self, chunk: Chunk, engine: str) -> bool:
        """Append newly sampled tokens. True if the generation was interrupted and must be dispatched
        again."""
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
            self._wake_paced()
        return False

    def interrupt(self, engine: str) -> bool:
        """Record that the engine has stopped sampling. True if the generation must be dispatched again: it
        has budget left."""
        if len(self.token_ids) >= self.request.max_tokens:
            self.finish(FinishReason.LENGTH)
            return False
        self.interruptions += 1
        if len(self.versions):
            self.cache_hint = CacheHint(engine, self.versions[-1], self.num_tokens)
        if self.request.stream:
            # the sampled tokens may end with a stop string, and the reader must get them in any case
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
        """Finish after this many tokens, whose text ends with a stop string, and drop the later tokens."""
        for column in (self.token_ids, self.logprobs, self.versions):
            del column[num_tokens:]
        self.finish(FinishReason.STOP)

    def wake(self) -> None:
        if self._progress is not None and not self._progress.done():
            self._progress.set_result(None)

    def _wake_paced(self) -> None:
        """Wake the reader for new tokens: at once for the first ones, else in the next round of its pace."""
        if self.pace is None or not self._num_seen:
            self.wake()
        elif self._progress is not None and not self._is_wake_scheduled:
            self._is_wake_scheduled = True
            self.pace.wake_in_next_round(self._wake_in_round)

    def _wake_in_round(self) -> None:
        self._is_wake_scheduled = False
        # an interruption may have woken the reader in the meantime
        if self._has_unseen_tokens:
            self.wake()

    @property
    def _has_unseen_tokens(self) -> bool:
        return self.request.stream and len(self.token_ids) > self._num_seen

    async def progress(self, num_seen: int) -> None:
        """Return when there are more tokens than `num_seen` (streams only; paced after the first ones), or
        when the generation is over. Raises ApiError if it is refused."""
        self._num_seen = num_seen
        is_paced = self.pace is not None and num_seen > 0
        may_return_now = self.is_over or (self._has_unseen_tokens and not is_paced)
        if not may_return_now:
            self._progress = asyncio.get_running_loop().create_future()
            if self._has_unseen_tokens:
                self._wake_paced()
            await self._progress
            self._progress = None
        if self.refusal is not None:
            raise self.refusal
