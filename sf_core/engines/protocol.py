"""The interface of engines. Engines take ids and give ids; they know no text, no HTTP and no sessions."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from sf_core.types import Chunk, GenerationRequest


class Engine(Protocol):
    """A synchronous engine, driven by one thread that alternates `submit`/`abort` with `step`."""

    @property
    def version(self) -> int:
        """Policy version of the weights held now."""
        ...

    @property
    def num_requests(self) -> int:
        """Requests accepted and not finished, running or waiting for a slot."""
        ...

    def submit(self, request: GenerationRequest) -> None:
        """Accept a request. It joins the running batch at the next step that has room.

        Raises ValueError if the prompt leaves no room for one token in the context window."""
        ...

    def abort(self, request_ids: Collection[str] | None = None) -> list[Chunk]:
        """End these requests (None: all). Returns one chunk each, with finish_reason ABORT and whatever
        tokens have not been reported yet. Unknown ids are ignored: they may just have finished."""
        ...

    def step(self) -> list[Chunk]:
        """Sample one token for every running request; returns the chunks to report. Empty if idle."""
        ...

    def load_weights(self, uri: str, version: int) -> None:
        """Replace the weights in place by those of the folder, between steps. Running requests go on and
        their later tokens carry the new version; whether their KV is recomputed is the engine's setting."""
        ...

    def close(self) -> None:
        """Release the device memory. The engine is not used afterwards."""
        ...
