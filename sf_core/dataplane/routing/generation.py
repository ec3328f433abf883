"""One turn's tokens, through any number of engines.

Owns what was sampled so far and what is left to ask for. Where it runs is the router's matter.
"""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.routing.pace import Pace
from sf_core.types import Chunk, FinishReason, GenerationRequest, Sampling

asked_by_request: ContextVar[list[Generation] | None] = ContextVar("asked_by_request", default=None)
"""What the HTTP request being served has asked of engines, for its figures; None where nobody wants them."""

ROUNDING = 1e-3
"""How far above 0 a log-prob may be: it is a difference of rounded numbers."""


@dataclass(frozen=True, slots=True)
class Near:
    """Where the KV of a prompt's beginning probably is."""

    engine_id: str
    version: int
    """Of the weights that computed it."""
    num_tokens: int


class Generation:
    """Interrupted, it continues from prompt + sampled ids with the remaining budget; whoever awaits it sees
    one growing sequence."""

    def __init__(
        self,
        request_id: str,
        prompt_ids: array[int],
        sampling: Sampling,
        max_tokens: int,
        stop_token_ids: tuple[int, ...],
        *,
        stream: bool,
        floor: int,
    ) -> None:
        self.request_id, self.prompt_ids, self.sampling = request_id, prompt_ids, sampling
        self.max_tokens, self.stop_token_ids, self.stream = max_tokens, stop_token_ids, stream
        self.on_start: Callable[[int], None] | None = None
        """Called with the policy version of the first engine that gets it."""
        self.pace: Pace | None = None
        """When a stream's reader hears of tokens behind the first ones; None: of each at once."""
        self.floor = floor
        """Only engines with this policy version or a later one may go on: versions never decrease."""
        self.token_ids: array[int] = array("i")
        self.logprobs: array[float] = array("f")
        self.versions: array[int] = array("i")
        self.engines: list[str] = []
        self.interruptions = 0
        self.num_faults = 0
        """How often an engine sent what cannot be taken."""
        self.finish_reason: FinishReason | None = None
        self.cancelled: str | None = None
        """Why nobody waits for it any more."""
        self.refusal: ApiError | None = None
        """Why it is not served; whoever awaits progress gets it raised."""
        self.session_id = ""
        self.num_reused = 0
        """Leading prompt tokens that were taken from the record, not encoded."""
        self.near: Near | None = None
        self.arrival: int | None = None
        """Its number among the requests of its run."""
        self.waiting_since = 0.0
        """Monotonic seconds, like those below: since when no engine works on it."""
        self.submitted_at = self.started_at = self.over_at = 0.0
        """0 while it has not happened: it came in, an engine first got it, its last token or its end came."""
        self.num_prefill = self.num_decode = 0
        """What its engine still has to do for it, estimated; links.py counts with them."""
        self.num_moved_at = 0
        """How many tokens it had when it was last moved from a long queue; 0: never."""
        self._progress: asyncio.Future[None] | None = None
        self._num_seen = 0
        self._is_due = False
        """Its reader is woken in the next round."""

    def comes_after(self, engine_id: str, version: int, num_tokens: int) -> None:
        """It extends so many recorded tokens, the last of them sampled by this engine with this version."""
        self.num_reused = num_tokens
        self.near = Near(engine_id, version, num_tokens)

    @property
    def is_over(self) -> bool:
        return self.finish_reason is not None or self.cancelled is not None or self.refusal is not None

    @property
    def num_tokens(self) -> int:
        """Of the prompt and of what was sampled so far."""
        return len(self.prompt_ids) + len(self.token_ids)

    def remaining_request(self, version: int) -> GenerationRequest:
        """What an engine that holds this version is to do."""
        if self.on_start is not None:
            self.on_start(version)
            self.on_start = None
        self.started_at = self.started_at or time.monotonic()
        produced = len(self.token_ids)
        return GenerationRequest(
            self.request_id,
            self.prompt_ids + self.token_ids if produced else self.prompt_ids,
            produced,
            self.max_tokens - produced,
            self.stop_token_ids,
            self.sampling,
            self.stream,
        )

    def fault_of(self, chunk: Chunk, newest: int, num_ids: int) -> str | None:
        """Why what an engine sent cannot be taken, as the end of a sentence; None if it can.

        `newest` is the version that the engine was last told to hold; ids are below `num_ids`."""
        ids, logprobs = chunk.token_ids, chunk.logprobs
        if len(ids) != len(logprobs):
            return f"sent {len(ids)} tokens with {len(logprobs)} log-probs"
        if not ids:
            return None
        if len(self.token_ids) + len(ids) > self.max_tokens:
            return f"sent {len(self.token_ids) + len(ids)} tokens where {self.max_tokens} were asked for"
        if not 0 <= min(ids) <= max(ids) < num_ids:
            return f"sent a token id that is not from 0 to {num_ids - 1}"
        # a sum, because comparisons pass over NaN
        if not math.isfinite(sum(logprobs)) or max(logprobs) > ROUNDING:
            return "sent a log-prob that is not the logarithm of a probability"
        if not self.floor <= chunk.version <= newest:
            return f"sent tokens of version {chunk.version}; expected {self.floor} to {newest}"
        return None

    def absorb(self, chunk: Chunk, engine: str) -> bool:
        """Take newly sampled tokens; True if the turn must go on elsewhere."""
        if chunk.token_ids:
            self.token_ids.extend(chunk.token_ids)
            self.logprobs.extend(chunk.logprobs)
            self.versions.extend([chunk.version] * len(chunk.token_ids))
            self.floor = max(self.floor, chunk.version)
            if engine not in self.engines:
                self.engines.append(engine)
        if chunk.finish_reason is FinishReason.ABORT:
            if len(self.token_ids) < self.max_tokens:
                self._interrupt(engine)
                return True
            self.finish(FinishReason.LENGTH)
        elif chunk.finish_reason is not None:
            self.finish(chunk.finish_reason)
        elif self.stream:
            self._wake_in_time()
        return False

    def _interrupt(self, engine: str) -> None:
        self.interruptions += 1
        if len(self.versions):
            self.near = Near(engine, self.versions[-1], self.num_tokens)
        if self.stream:
            # what was sampled may end with a stop string, and is due to the reader in any case
            self.wake()

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
        """The text up to this token ends with a stop string; what was sampled behind it is dropped."""
        for values in (self.token_ids, self.logprobs, self.versions):
            del values[num_tokens:]
        self.finish(FinishReason.STOP)

    def wake(self) -> None:
        if self._progress is not None and not self._progress.done():
            self._progress.set_result(None)

    def _wake_in_time(self) -> None:
        """There are tokens to be seen: the first are told of at once, others in the pace's next round."""
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
        return self.stream and len(self.token_ids) > self._num_seen

    async def progress(self, num_seen: int) -> None:
        """Returns when there are more tokens than those seen (streams; behind the first ones at their pace)
        or the turn is over. Raises ApiError if the turn is refused."""
        self._num_seen = num_seen
        if not self.is_over and not (self._has_more and (self.pace is None or not num_seen)):
            self._progress = asyncio.get_running_loop().create_future()
            if self._has_more:
                self._wake_in_time()
            await self._progress
            self._progress = None
        if self.refusal is not None:
            raise self.refusal
