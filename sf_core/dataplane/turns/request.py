"""Requests in the canonical form that every dialect is parsed into, and their fingerprints, by which retries
are recognised.

Clients mark a retry by `Idempotency-Key` (any HTTP client may send one) or by `X-Stainless-Retry-Count` (the
OpenAI and Anthropic SDKs always do). An agent that repeats a request itself after its stream broke sends
neither; an equal body is a retry while the turn has no client or its answer was not delivered. Two clients
that wait for equal bodies at the same time are two samples of one prompt, not a retry.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Literal

from sf_core.dataplane.chat.answer_grammar import Schema
from sf_core.dataplane.chat.messages import LeftOut, Message
from sf_core.dataplane.chat.tool_formats import Tool
from sf_core.types import Sampling


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


@dataclass(frozen=True, slots=True)
class ToolChoice:
    kind: Literal["auto", "none", "required"] = "auto"
    name: str | None = None
    """The tool that must be called; None with kind `required`: any tool."""
    parallel: bool = True
    """False: the turn ends with its first call."""


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One prompt and how to continue it."""

    messages: list[Message] = field(default_factory=list)
    merges_system: bool = False
    """System messages after the first are merged into it if the template refuses them elsewhere."""
    text_or_ids: str | list[int] | None = None
    """Text that is encoded as it is, or token ids; given instead of messages."""
    adds_special: bool = False
    """Whether the tokenizer adds its special tokens to that text, for example one that begins every text."""
    tools: list[Tool] = field(default_factory=list)
    """Tools as the chat template gets them."""
    template_options: dict[str, Any] = field(default_factory=dict)
    """Further variables of the chat template."""
    tool_choice: ToolChoice = ToolChoice()
    schema: Schema | None = None
    """JSON Schema of the answer's content; None: the content is free."""
    stop: list[str] = field(default_factory=list)
    max_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    """The sampling that the agent asks for, without the seed."""
    seed: int | None = None
    """None: each turn has a random seed."""
    num_samples: int = 1
    """Number of turns to sample from the prompt."""
    stream: bool = False
    logprobs: bool = False
    left_out: LeftOut = field(default_factory=LeftOut)
    """Parts of the request that the model is not shown."""

    def texts(self) -> Iterator[Any]:
        """JSON values that hold all text of the prompt."""
        yield from self.messages
        yield from self.tools
        yield self.template_options
        if isinstance(self.text_or_ids, str):
            yield self.text_or_ids

    @property
    def calls_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice.kind != "none"
