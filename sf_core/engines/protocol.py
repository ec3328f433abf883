"""The interface of engines. Engines take ids and give ids; they know no text, no HTTP and no sessions."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection
from typing import Protocol, runtime_checkable

from sf_core.types import Chunk, GenerationRequest, WeightsRef


class EngineLostError(ConnectionError):
    """The process or device behind an engine is gone, and its requests with it. `update_weights` starts it
    anew."""


class StepFailedError(ConnectionError):
    """The engine failed at its requests, although it works. The data plane finds out which one is at fault
    when the engine connects again."""


class WeightsRefusedError(ValueError):
    """Weights are damaged or not of this model. The engine goes on with those it holds."""


class Engine(Protocol):
    """What engines of both kinds have: those that step, and those that sample by themselves. An engine is
    made at rest, without weights and without memory on its device, and kept for several leases. It is used by
    one thread at a time, through a driver (drivers/)."""

    @property
    def num_requests(self) -> int:
        """Requests accepted and not finished, running or waiting for a slot."""

    def update_weights(self, weights: WeightsRef) -> None:
        """Begin to fetch weights, and at rest to start; returns at once. The engine holds them later, once
        they are there and verified. Weights taken before that are then forgotten. Running requests go on and
        their later tokens carry the new version; whether their KV is recomputed is the engine's setting."""

    def submit(self, request: GenerationRequest) -> None:
        """Accept a request. It joins the running batch as soon as that has room. Called only while the engine
        has weights.

        Raises ValueError if it cannot be done here, for example if the prompt leaves no room for one token in
        the context window."""

    def close(self) -> None:
        """End the engine and all its processes. It is not used afterwards."""


@runtime_checkable
class StepEngine(Engine, Protocol):
    """An engine that samples when it is told to: its driver alternates `submit` and `abort` with `step`."""

    @property
    def version(self) -> int | None:
        """Policy version of the weights held now; None at rest and until the first weights are there. It
        changes in a step."""

    def abort(self, request_ids: Collection[str] | None = None) -> list[Chunk]:
        """End these requests (None: all). Returns one chunk each, with finish_reason ABORT and whatever
        tokens have not been reported yet. Unknown ids are ignored: they may just have finished."""

    def step(self) -> list[Chunk]:
        """Sample one token for every running request; returns the chunks to report. The step in which the
        version changes samples nothing.

        Raises WeightsRefusedError once if the weights on their way are unusable but there are others,
        EngineLostError if the engine must start anew, and, if there are no weights, whatever made
        them or the engine fail. After any other error all requests are aborted, and the engine goes on if it
        still can sample."""

    def pause(self) -> None:
        """Sample nothing until `resume`. Requests and their KV stay; weights are taken meanwhile."""

    def resume(self) -> None: ...

    def rest(self) -> None:
        """Give the device's memory back, within a second even while weights are on their way. Requests that
        were not aborted are forgotten. `update_weights` ends it."""


Event = Chunk | WeightsRef | Exception
"""What an engine that samples by itself tells: tokens; weights that sample all later ones; and what `step`
would raise."""


class AsyncEngine(Engine, Protocol):
    """An engine that samples by itself and tells what happens. All but `close` is called on its event loop,
    which runs during leases only, in the thread of the lease. What `StepEngine` says holds here too."""

    loop: asyncio.AbstractEventLoop
    emit: Callable[[Event], None]
    """Set by the driver; called on the loop. It raises nothing."""

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        """Returns when the last chunk of each was told."""

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def rest(self) -> None: ...


def check_request(
    request: GenerationRequest, context_length: int, vocab_size: int, *, is_multimodal: bool = False
) -> None:
    """Raises ValueError if no engine of this context and vocabulary can do it. `is_multimodal`: whether the
    engine shows images."""
    ids = request.prompt_ids
    if not 0 < len(ids) < context_length:
        raise ValueError(f"the prompt has {len(ids)} tokens; expected 1 to {context_length - 1}")
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise ValueError(f"the prompt has a token id outside the vocabulary of {vocab_size} tokens")
    if request.images and not is_multimodal:
        raise ValueError("images were given, but this engine does not support images")
    if request.max_tokens < 1:
        raise ValueError(f"max_tokens is {request.max_tokens}; expected at least 1")
    how = request.sampling
    if not (0 <= how.temperature < math.inf and 0 <= how.top_p <= 1):
        raise ValueError(f"temperature is {how.temperature} and top_p {how.top_p}; expected finite values")
    if not (0 <= how.top_k < 2**31 and 0 <= how.seed < 2**64):
        raise ValueError(f"top_k is {how.top_k} and the seed {how.seed}; expected at most 31 and 64 bits")
