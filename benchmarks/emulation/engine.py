"""An engine that sleeps instead of computing: as long as a device would, or a stated delay per token.

Owns no model: a turn's tokens count up, so that a lost or repeated one shows in the text of the answer.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from benchmarks.emulation.continuous_batch import ConstantDelay, ContinuousBatch, DevicePace, Slot
from benchmarks.emulation.kept_prefixes import KeptPrefixes
from sf_core.types import Chunk, FinishReason, GenerationRequest, WeightsRef

FIRST_ID = 10
NUM_IDS = 64
"""Token i of a turn is FIRST_ID + i % NUM_IDS: an ordinary character in most vocabularies, a stop token in
none."""

MAX_SLEEP_S = 0.0005
"""Longest sleep: a request that arrives while nothing is due is seen this late at most."""

STALL_S = 0.1
"""Steps further apart are a pause: nothing is sampled between them."""

BLOCK = 16
"""Tokens per block of the prefix cache, which finds whole blocks only, like vLLM's."""

Value = TypeVar("Value", int, float)

_BLOCK_BYTES = BLOCK * array("i").itemsize
_REPORT_EVERY = 16
_IDS = [FIRST_ID + i for i in range(NUM_IDS)]
_LOGPROBS = [-(1 + i) / NUM_IDS for i in range(NUM_IDS)]


class EmulatedEngine:
    """Every running request gets one token per step, and a step takes as long as `pace` says; a number is the
    delay of a token, at 0 the whole answer comes in the next step. Turns end with LENGTH at their budget.

    Of weights it takes only the version, `weight_load_s` after it was told to, and samples on meanwhile;
    `wake_s` gives the seconds until the first ones after a rest. With `recompute` the KV of running requests
    is then prefilled again. A prompt that begins with the tokens of a turn that ended here reuses the KV of
    that turn, if `kv_tokens` had room for it and no weights were taken since; others are prefilled whole.
    """

    def __init__(
        self,
        pace: DevicePace | float,
        *,
        report_every: int = _REPORT_EVERY,
        weight_load_s: float = 0.0,
        wake_s: Callable[[], float] = lambda: 0.0,
        recompute: bool = False,
        kv_tokens: int = 0,
        max_sleep_s: float = MAX_SLEEP_S,
        stall_s: float = STALL_S,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._batch = ContinuousBatch(ConstantDelay(pace) if isinstance(pace, float) else pace)
        self._is_instant = pace == 0.0
        self._version: int | None = None
        self._next: tuple[int, float] | None = None
        """The version on its way, and when it is there."""
        self._paused = False
        self._report_every = report_every
        self._weight_load_s = weight_load_s
        self._wake_s = wake_s
        self._recompute = recompute
        self._max_sleep_s = max_sleep_s
        self._stall_s = stall_s
        self._now = now
        self._sleep = sleep
        self._kept = KeptPrefixes(kv_tokens) if kv_tokens else None
        self._turns: dict[str, _EmulatedTurn] = {}
        self._unreported: list[Chunk] = []
        """Chunks that were due between steps."""
        self._last_tick = now()

    @property
    def version(self) -> int | None:
        return self._version

    @property
    def num_requests(self) -> int:
        # at 0 the driver asks for no more steps, so a request whose end was not reported counts
        return len(self._turns) + sum(chunk.finish_reason is not None for chunk in self._unreported)

    def submit(self, request: GenerationRequest) -> None:
        if request.request_id in self._turns:
            raise ValueError(f"request {request.request_id!r} is already running")
        if not self._paused:
            self._tick()
        wanted = request.max_tokens
        every = wanted if self._is_instant else 1 if request.stream else self._report_every
        slot = self._batch.join(
            request.request_id, len(request.prompt_ids), wanted, every, num_cached=self._take_kept(request)
        )
        self._turns[request.request_id] = _EmulatedTurn(request, slot)

    def abort(self, request_ids: Collection[str] | None = None) -> list[Chunk]:
        ended = [r for r in self._turns if request_ids is None or r in request_ids]
        chunks = [self._report(self._turns[r], FinishReason.ABORT) for r in ended]
        for request_id in ended:
            turn = self._turns.pop(request_id)
            self._batch.leave(turn.slot)
            self._keep(turn)
        return self._take_unreported() + chunks

    def update_weights(self, weights: WeightsRef) -> None:
        seconds = self._wake_s() if self._version is None else self._weight_load_s
        self._next = weights.version, self._now() + seconds

    def step(self) -> list[Chunk]:
        """Sleep until a chunk is due, `max_sleep_s` at most; returns the chunks that are due."""
        if self._next is not None and self._next[1] <= self._now():
            return self._change_version(self._next[0])
        if self._version is None or self._paused:
            self._sleep(self._max_sleep_s)
            return []
        self._tick()
        if not self._unreported and (wait_s := self._batch.next_due_s()):
            self._sleep(min(wait_s, self._max_sleep_s))
            self._tick()
        return self._take_unreported()

    def _change_version(self, version: int) -> list[Chunk]:
        """Tokens sampled before keep the old version."""
        if not self._paused:
            self._tick()
        chunks = [self._report(turn) for turn in list(self._turns.values())]
        chunks = self._take_unreported() + [chunk for chunk in chunks if chunk.token_ids]
        if self._recompute and self._turns:
            self._batch.recompute()
        if self._kept is not None:
            self._kept.clear()
        self._version = version
        self._next = None
        self._last_tick = self._now()
        return chunks

    def pause(self) -> None:
        if not self._paused:
            self._tick()
        self._paused = True

    def resume(self) -> None:
        self._paused, self._last_tick = False, self._now()

    def rest(self) -> None:
        for turn in self._turns.values():
            self._batch.leave(turn.slot)
        self._turns.clear()
        self._unreported.clear()
        if self._kept is not None:
            self._kept.clear()
        self._version = self._next = None

    def close(self) -> None:
        self.rest()

    def _tick(self) -> None:
        now = self._now()
        elapsed = now - self._last_tick
        self._last_tick = now
        due = self._batch.advance(elapsed if elapsed < self._stall_s else 0.0)
        for slot in dict.fromkeys(due):
            self._unreported.append(self._report(self._turns[slot.name]))

    def _take_unreported(self) -> list[Chunk]:
        chunks = self._unreported
        self._unreported = []
        return chunks

    def _report(self, turn: _EmulatedTurn, finish_reason: FinishReason | None = None) -> Chunk:
        """A chunk of all tokens sampled by now and not reported yet."""
        start = turn.num_reported
        end = self._batch.num_sampled(turn.slot)
        turn.num_reported = end
        if end == turn.request.max_tokens:
            finish_reason = finish_reason or FinishReason.LENGTH
        if finish_reason is FinishReason.LENGTH:
            del self._turns[turn.request.request_id]
            self._keep(turn)
        first = turn.request.position + start
        assert self._version is not None
        return Chunk(
            turn.request.request_id,
            _cycle(_IDS, first, end - start),
            _cycle(_LOGPROBS, first, end - start),
            self._version,
            finish_reason,
        )

    def _keep(self, turn: _EmulatedTurn) -> None:
        """Keep the KV of a turn that ended; it is lost if no token was sampled."""
        if self._kept is not None and turn.num_reported:
            sampled = _cycle(_IDS, turn.request.position, turn.num_reported)
            blocks = _blocks([*turn.request.prompt_ids, *sampled])
            if blocks:
                self._kept.keep(blocks[-1], BLOCK * len(blocks), self._batch.context)

    def _take_kept(self, request: GenerationRequest) -> int:
        if self._kept is None:
            return 0
        blocks = _blocks(request.prompt_ids[:-1])  # the first draw needs the logits of the last token
        longest = next((block for block in reversed(blocks) if block in self._kept), None)
        return 0 if longest is None else self._kept.take(longest)


class _EmulatedTurn:
    def __init__(self, request: GenerationRequest, slot: Slot) -> None:
        self.request = request
        self.slot = slot
        self.num_reported = 0


def _blocks(ids: Sequence[int]) -> list[int]:
    """Chained hashes, one per whole block, of all ids up to its end."""
    numbers = []
    number = 0
    data = array("i", ids).tobytes()
    for end in range(_BLOCK_BYTES, len(data) + 1, _BLOCK_BYTES):
        number = hash((number, data[end - _BLOCK_BYTES : end]))
        numbers.append(number)
    return numbers


def _cycle(values: list[Value], start: int, length: int) -> list[Value]:
    start %= NUM_IDS
    return (values * ((start + length) // NUM_IDS + 1))[start : start + length]
