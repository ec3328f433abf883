"""The interface of engines. Engines take ids and give ids; they know no text, no HTTP and no sessions."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from sf_core.types import Chunk, GenerationRequest, WeightsRef


class EngineLostError(ConnectionError):
    """The process or device behind an engine is gone, and its requests with it. `take_weights` starts it
    anew."""


class WeightsRefusedError(ValueError):
    """Weights are damaged or not of this model. The engine goes on with those it holds."""


class Engine(Protocol):
    """A synchronous engine, driven by one thread that alternates `submit` and `abort` with `step`. It is made
    at rest, without weights and without memory on its device, and kept for several leases."""

    @property
    def version(self) -> int | None:
        """Policy version of the weights held now; None at rest and until the first weights are there."""
        ...

    @property
    def num_requests(self) -> int:
        """Requests accepted and not finished, running or waiting for a slot."""
        ...

    def take_weights(self, weights: WeightsRef) -> None:
        """Begin to fetch weights, and at rest to start; returns at once. The version changes in a later step,
        once they are there and verified. Weights taken before that are then forgotten. Running requests go on
        and their later tokens carry the new version; whether their KV is recomputed is the engine's
        setting."""
        ...

    def submit(self, request: GenerationRequest) -> None:
        """Accept a request. It joins the running batch at the next step that has room. Called only while the
        engine has a version.

        Raises ValueError if it cannot be done here, for example if the prompt leaves no room for one token in
        the context window."""
        ...

    def abort(self, request_ids: Collection[str] | None = None) -> list[Chunk]:
        """End these requests (None: all). Returns one chunk each, with finish_reason ABORT and whatever
        tokens have not been reported yet. Unknown ids are ignored: they may just have finished."""
        ...

    def step(self) -> list[Chunk]:
        """Sample one token for every running request; returns the chunks to report. The step in which the
        version changes samples nothing.

        Raises WeightsRefusedError once if the weights on their way are unusable but there are others,
        EngineLostError if the engine must start anew, and, if there are no weights, whatever made
        them or the engine fail."""
        ...

    def pause(self) -> None:
        """Sample nothing until `resume`. Requests and their KV stay; weights are taken meanwhile."""
        ...

    def resume(self) -> None: ...

    def rest(self) -> None:
        """Give the device's memory back, within a second even while weights are on their way. Requests that
        were not aborted are forgotten. `take_weights` ends it."""
        ...

    def close(self) -> None:
        """End the engine and all its processes. It is not used afterwards."""
        ...
