"""An engine that costs nothing but the delay of its tokens: what benchmarks put behind the gateway.

Owns no model: a turn's tokens count up, so that a lost or repeated one shows in the text of the answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from heapq import heappop, heappush
from itertools import count
from typing import TypeVar

from sf_core.types import Chunk, FinishReason, GenerationRequest

FIRST_ID, NUM_IDS = 10, 64
"""Token i of a turn is FIRST_ID + i % NUM_IDS: an ordinary character in most vocabularies, a stop token in
none."""

MAX_SLEEP_S = 0.0005
"""So late, at most, a request is seen that arrives while nothing is due."""

STALL_S = 0.1
"""Steps further apart are a pause: nothing is sampled between them."""

Value = TypeVar("Value", int, float)

_REPORT_EVERY = 16
_ROUNDING_S = 1e-9
_IDS = [FIRST_ID + i for i in range(NUM_IDS)]
_LOGPROBS = [-(1 + i) / NUM_IDS for i in range(NUM_IDS)]


class EmulatedEngine:
    """Every running request, however many there are, gets one token per `token_delay_s`; at 0 its whole
    answer in the next step. Turns end with LENGTH at their budget."""

    def __init__(
        self,
        token_delay_s: float,
        *,
        version: int = 0,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._token_delay_s = token_delay_s
        self._version = version
        self._now, self._sleep = now, sleep
        self._turns: dict[str, _Turn] = {}
        self._due: list[tuple[float, int, _Turn]] = []
        """Heap of reports by time; those of ended turns are passed over."""
        self._order = count()
        self._before_update: list[Chunk] = []
        self._time = 0.0
        """Seconds it was stepped; a paused engine's time stands still."""
        self._last_tick = now()

    @property
    def version(self) -> int:
        return self._version

    @property
    def num_requests(self) -> int:
        return len(self._turns)

    def submit(self, request: GenerationRequest) -> None:
        if request.request_id in self._turns:
            raise ValueError(f"request {request.request_id!r} is already running")
        self._tick()
        turn = self._turns[request.request_id] = _Turn(request, self._time)
        self._expect(turn)

    def abort(self, request_ids: Collection[str] | None = None) -> list[Chunk]:
        ended = [r for r in self._turns if request_ids is None or r in request_ids]
        return [self._report(self._turns.pop(r), FinishReason.ABORT) for r in ended]

    def step(self) -> list[Chunk]:
        """Sleeps until a report is due, `MAX_SLEEP_S` at most, and gives those that are."""
        chunks, self._before_update = self._before_update, []
        self._tick()
        if not chunks and self._due and (wait_s := self._due[0][0] - self._time) > 0:
            self._sleep(min(wait_s, MAX_SLEEP_S))
            self._tick()
        while self._due and self._due[0][0] <= self._time + _ROUNDING_S:
            _, _, turn = heappop(self._due)
            if self._turns.get(turn.request.request_id) is not turn:
                continue
            chunk = self._report(turn)
            chunks.append(chunk)
            if chunk.finish_reason is None:
                self._expect(turn)
            else:
                del self._turns[turn.request.request_id]
        return chunks

    def load_weights(self, uri: str, version: int) -> None:
        """Only the version changes; the folder is not read. What was sampled before keeps the old one."""
        chunks = [self._report(turn) for turn in self._turns.values()]
        self._before_update += [chunk for chunk in chunks if chunk.token_ids]
        for chunk in chunks:
            if chunk.finish_reason is not None:
                del self._turns[chunk.request_id]
        self._version = version

    def close(self) -> None:
        self._turns.clear()
        self._due.clear()

    def _tick(self) -> None:
        now = self._now()
        elapsed, self._last_tick = now - self._last_tick, now
        if elapsed < STALL_S:
            self._time += elapsed

    def _expect(self, turn: _Turn) -> None:
        tokens = turn.num_reported + (1 if turn.request.stream else _REPORT_EVERY)
        due = turn.started + min(tokens, turn.request.max_tokens) * self._token_delay_s
        heappush(self._due, (due, next(self._order), turn))

    def _report(self, turn: _Turn, finish_reason: FinishReason | None = None) -> Chunk:
        """Everything sampled by now and not reported yet."""
        start, end = turn.num_reported, self._num_sampled(turn)
        turn.num_reported = end
        if finish_reason is None and end == turn.request.max_tokens:
            finish_reason = FinishReason.LENGTH
        first = turn.request.position + start
        return Chunk(
            turn.request.request_id,
            _cycle(_IDS, first, end - start),
            _cycle(_LOGPROBS, first, end - start),
            self._version,
            finish_reason,
        )

    def _num_sampled(self, turn: _Turn) -> int:
        if not self._token_delay_s:
            return turn.request.max_tokens
        # a report that is due must find its last token sampled
        elapsed = self._time - turn.started + 2 * _ROUNDING_S
        return min(int(elapsed / self._token_delay_s), turn.request.max_tokens)


class _Turn:
    def __init__(self, request: GenerationRequest, started: float) -> None:
        self.request, self.started = request, started
        self.num_reported = 0


def _cycle(values: list[Value], start: int, length: int) -> list[Value]:
    start %= NUM_IDS
    return (values * ((start + length) // NUM_IDS + 1))[start : start + length]
