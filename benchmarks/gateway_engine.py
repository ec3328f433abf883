"""An engine that computes nothing, as a process that dials out to a data plane:
`python -m benchmarks.gateway_engine`."""

from __future__ import annotations

import time
from collections.abc import Collection

import typer

from benchmarks.emulation.engine import FIRST_ID, MAX_SLEEP_S, NUM_IDS, EmulatedEngine
from sf_core.dataplane.operator_key import operator_key
from sf_core.engines.drivers.serve import serve_engine
from sf_core.engines.wire import Hello
from sf_core.types import Chunk, FinishReason, GenerationRequest, WeightsRef


class SteppingEngine:
    """Samples one token for every request at each step, as a device does, and reports them at once. A step
    takes `step_s`, or the time of the reporting if that is longer."""

    def __init__(self, step_s: float) -> None:
        self.version: int | None = None
        self._next_version: int | None = None
        self._step_s = step_s
        self._next_at = time.monotonic()
        self._running: dict[str, tuple[int, int]] = {}
        """Positions of the next token and of the end, by request."""

    @property
    def num_requests(self) -> int:
        return len(self._running)

    def submit(self, request: GenerationRequest) -> None:
        self._running[request.request_id] = request.position, request.position + request.max_tokens

    def abort(self, request_ids: Collection[str] | None = None) -> list[Chunk]:
        ended = [name for name in self._running if request_ids is None or name in request_ids]
        for name in ended:
            del self._running[name]
        return [Chunk(name, [], [], self.version or 0, FinishReason.ABORT) for name in ended]

    def update_weights(self, weights: WeightsRef) -> None:
        self._next_version = weights.version

    def step(self) -> list[Chunk]:
        if self._next_version is not None:
            self.version = self._next_version
            self._next_version = None
            return []
        now = time.monotonic()
        if now < self._next_at:
            # short, so that new requests are seen
            time.sleep(min(self._next_at - now, MAX_SLEEP_S))
            return []
        self._next_at = max(self._next_at + self._step_s, now)
        return [self._sample(name, at, end) for name, (at, end) in list(self._running.items())]

    def _sample(self, name: str, at: int, end: int) -> Chunk:
        is_last = at + 1 == end
        if is_last:
            del self._running[name]
        else:
            self._running[name] = at + 1, end
        reason = FinishReason.LENGTH if is_last else None
        assert self.version is not None
        return Chunk(name, [FIRST_ID + at % NUM_IDS], [-0.5], self.version, reason)

    def pause(self) -> None:
        """Not asked for by the benchmarks."""

    def resume(self) -> None: ...

    def rest(self) -> None:
        self._running.clear()
        self.version = self._next_version = None

    def close(self) -> None:
        self.rest()


def main(
    url: str,
    run_id: str,
    lease: str,
    token_delay_ms: float,
    max_running: int = 10_000,
    stepping: bool = False,
) -> None:
    hello = Hello(run_id, 1, lease, 0, lease, lease, max_running)

    delay_s = token_delay_ms / 1000
    serve_engine(
        url, operator_key(url), hello, SteppingEngine(delay_s) if stepping else EmulatedEngine(delay_s)
    )


if __name__ == "__main__":
    typer.run(main)
