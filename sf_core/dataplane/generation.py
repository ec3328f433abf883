"""One turn's tokens, through any number of engines.

Owns what was sampled so far and what is left to ask for. Where it runs is the router's matter.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable

from sf_core.types import Chunk, FinishReason, GenerationRequest, Sampling


class Generation:
    """Interrupted, it continues from prompt + sampled ids with the remaining budget; whoever awaits it sees
    one growing sequence."""

    def __init__(
        self,
        request_id: str,
        prompt_ids: list[int],
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
        self.floor = floor
        """Only engines with this policy version or a later one may go on: versions never decrease."""
        self.token_ids: array[int] = array("i")
        self.logprobs: array[float] = array("f")
        self.versions: array[int] = array("i")
        self.engines: list[str] = []
        self.interruptions = 0
        self.finish_reason: FinishReason | None = None
        self.cancelled: str | None = None
        """Why nobody waits for it any more."""
        self._progress: asyncio.Future[None] | None = None

    @property
    def is_over(self) -> bool:
        return self.finish_reason is not None or self.cancelled is not None

    def remaining_request(self, version: int) -> GenerationRequest:
        """What an engine that holds this version is to do."""
        if self.on_start is not None:
            self.on_start(version)
            self.on_start = None
        produced = len(self.token_ids)
        return GenerationRequest(
            self.request_id,
            self.prompt_ids + self.token_ids.tolist() if produced else self.prompt_ids,
            produced,
            self.max_tokens - produced,
            self.stop_token_ids,
            self.sampling,
            self.stream,
        )

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
                self.interruptions += 1
                return True
            self.finish_reason = FinishReason.LENGTH
        else:
            self.finish_reason = chunk.finish_reason
        if self.finish_reason is not None or self.stream:
            self.wake()
        return False

    def end_at(self, num_tokens: int) -> None:
        """The text up to this token ends with a stop string; what was sampled behind it is dropped."""
        for values in (self.token_ids, self.logprobs, self.versions):
            del values[num_tokens:]
        self.finish_reason = FinishReason.STOP

    def wake(self) -> None:
        if self._progress is not None and not self._progress.done():
            self._progress.set_result(None)

    async def progress(self, num_seen: int) -> None:
        """Returns when there are more tokens than those seen (streams) or the turn is over."""
        if not self.is_over and not (self.stream and len(self.token_ids) > num_seen):
            self._progress = asyncio.get_running_loop().create_future()
            await self._progress
