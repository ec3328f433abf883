"""The fingerprint of a request, by which a retry is recognised.

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
class RequestFingerprint:
    """The digest that a request and its retries have in common."""

    digest: bytes
    """Digest of the client's key, else of the body; `for_turn` adds the index of the turn."""
    is_marked: bool
    """Whether the request is marked as a retry, or has a key: even a delivered answer is sent once more."""

    @classmethod
    def from_request(cls, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> RequestFingerprint:
        """Header names are lower case, as in ASGI."""
        value_by_name = dict(headers)
        key = value_by_name.get(b"idempotency-key")
        num_retries = value_by_name.get(b"x-stainless-retry-count", b"0")
        digest = _digest(body, b"body") if key is None else _digest(key, b"key")
        is_retry = num_retries not in (b"", b"0")
        return cls(digest, is_marked=key is not None or is_retry)

    def for_turn(self, index: int) -> RequestFingerprint:
        """The fingerprint of one of the turns for which the request asks."""
        return replace(self, digest=_digest(self.digest + index.to_bytes(4, "little"), b"turn"))


def _digest(data: bytes, kind: bytes) -> bytes:
    return blake2b(data, digest_size=16, person=kind).digest()
