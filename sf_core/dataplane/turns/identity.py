"""What a request is known by when it is sent again.

Clients mark a retry by `Idempotency-Key` (any HTTP client may send one) or by `X-Stainless-Retry-Count` (the
OpenAI and Anthropic SDKs always do). An agent that repeats a request itself after its stream broke sends
neither; an equal body is a retry while the turn has no client or its answer was not delivered. Two clients
that wait for equal bodies at the same time are two samples of one prompt, not a retry.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from hashlib import blake2b


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """Identifies a request when it is retried."""

    digest: bytes
    """Digest of the client's key, else of the body; `of_turn` adds the index of the turn."""
    insists: bool
    """The request is marked as a retry or has a key: even a delivered answer is sent once more."""

    @classmethod
    def of(cls, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> RequestIdentity:
        """The identity of a request. Header names are lower case, as in ASGI."""
        found = dict(headers)
        key = found.get(b"idempotency-key")
        retries = found.get(b"x-stainless-retry-count", b"0")
        digest = _digest(body, b"body") if key is None else _digest(key, b"key")
        return cls(digest, key is not None or retries not in (b"", b"0"))

    def of_turn(self, number: int) -> RequestIdentity:
        """The identity of one of the turns that the request asks for."""
        return replace(self, digest=_digest(self.digest + number.to_bytes(4, "little"), b"turn"))


def _digest(data: bytes, kind: bytes) -> bytes:
    return blake2b(data, digest_size=16, person=kind).digest()
