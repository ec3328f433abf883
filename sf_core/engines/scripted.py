"""An engine without a model: a script decides what is "sampled". Everything else of the Engine protocol is
honoured, so tests of the parts around an engine are deterministic and cheap."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from sf_core.config import RunConfig
from sf_core.config.devices import WorkerDevice
from sf_core.models.counter import uniforms
from sf_core.settings import load_object
from sf_core.types import Chunk, FinishReason, GenerationRequest, WeightsRef

Script = Callable[[list[int], int], list[int]]
"""(prompt ids at the start of the turn, seed of the turn) -> the ids of the whole turn."""

_REPORT_EVERY = 16


def scripted_logprob(token: int, position: int, version: int) -> float:
    """The log-prob a ScriptedEngine reports for a token: a float32 value in (-8, 0]."""
    return float(np.float32(-8 * uniforms(token, position * 1_000_003 + version)[0]))


def make_engine(config: RunConfig, start_dir: str, device: WorkerDevice) -> ScriptedEngine:
    settings = config.engine
    assert settings.script is not None
    return ScriptedEngine(load_object(settings.script), max_running=settings.max_running)


class ScriptedEngine:
    """A turn ends with STOP at a stop token or where its script ends, with LENGTH at its budget. It takes the
    version of weights, and reads no file."""

    def __init__(self, script: Script, *, max_running: int = 128, tokens_per_step: int = 1) -> None:
        self._script = script
        self.version: int | None = None
        self._next_version: int | None = None
        """Version that the next step takes."""
        self._paused = False
        self._max_running = max_running
        self._tokens_per_step = tokens_per_step
        self._turns: dict[str, _ScriptedTurn] = {}

    @property
    def num_requests(self) -> int:
        return len(self._turns)

    def submit(self, request: GenerationRequest) -> None:
        if request.request_id in self._turns:
            raise ValueError(f"request {request.request_id!r} is already running")
        start_ids = list(request.prompt_ids[: len(request.prompt_ids) - request.position])
        script_ids = self._script(start_ids, request.sampling.seed)
        self._turns[request.request_id] = _ScriptedTurn(request, script_ids[request.position :])

    def abort(self, request_ids: Collection[str] | None = None) -> list[Chunk]:
        ended = [r for r in self._turns if request_ids is None or r in request_ids]
        return [self._turns.pop(r).report(self.version or 0, FinishReason.ABORT) for r in ended]

    def update_weights(self, weights: WeightsRef) -> None:
        self._next_version = weights.version

    def step(self) -> list[Chunk]:
        if self._next_version is not None:
            chunks = [turn.report(turn.version) for turn in self._turns.values() if turn.unreported]
            self.version = self._next_version
            self._next_version = None
            return chunks
        if self.version is None or self._paused:
            return []
        chunks = []
        for turn in list(self._turns.values())[: self._max_running]:
            finish_reason = turn.advance(self._tokens_per_step, self.version)
            if finish_reason is not None:
                del self._turns[turn.request.request_id]
            if finish_reason is not None or turn.is_due:
                chunks.append(turn.report(self.version, finish_reason))
        return chunks

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def rest(self) -> None:
        self._turns.clear()
        self.version = None
        self._next_version = None

    def close(self) -> None:
        self.rest()


class _ScriptedTurn:
    def __init__(self, request: GenerationRequest, script_ids: list[int]) -> None:
        self.request = request
        self.version = 0
        """Policy version of the unreported tokens."""
        self.unreported = 0
        self._script_ids = script_ids
        self._sampled = 0

    @property
    def is_due(self) -> bool:
        return self.unreported >= (1 if self.request.stream else _REPORT_EVERY)

    def advance(self, num_tokens: int, version: int) -> FinishReason | None:
        """Sample up to num_tokens; returns why the turn ended, None if it did not."""
        self.version = version
        for _ in range(num_tokens):
            if self._sampled == len(self._script_ids):
                return FinishReason.STOP
            self._sampled += 1
            self.unreported += 1
            if self._script_ids[self._sampled - 1] in self.request.stop_token_ids:
                return FinishReason.STOP
            if self._sampled == self.request.max_tokens:
                return FinishReason.LENGTH
        return FinishReason.STOP if self._sampled == len(self._script_ids) else None

    def report(self, version: int, finish_reason: FinishReason | None = None) -> Chunk:
        """The unreported tokens; `version` is what an empty chunk carries."""
        start = self._sampled - self.unreported
        end = self._sampled
        version = self.version if self.unreported else version
        token_ids = self._script_ids[start:end]
        first = self.request.position + start
        logprobs = [scripted_logprob(token, first + i, version) for i, token in enumerate(token_ids)]
        self.unreported = 0
        return Chunk(self.request.request_id, token_ids, logprobs, version, finish_reason)
