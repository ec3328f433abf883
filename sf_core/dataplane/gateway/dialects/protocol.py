"""The interface of a dialect: parses request bodies, writes answers whole or as a stream of events.

`whole`, `start`, `piece`, `end_turn`, `end` and `fail` return bytes of an HTTP body.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import msgspec

from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.gateway.dialects.checks import Body
from sf_core.dataplane.sessions.session import Session
from sf_core.dataplane.turns.answer import Answer, Pieces
from sf_core.dataplane.turns.request import TurnRequest

MAX_TURNS = 128
"""Most turns of one request: samples times prompts."""


class Reply(Protocol):
    """The response to one request. `index` counts its turns: prompts in order, samples of each together."""

    def whole(self, answers: list[Answer]) -> bytes: ...

    def start(self, num_prompt_tokens: int) -> bytes: ...

    def piece(self, index: int, pieces: Pieces) -> bytes: ...

    def end_turn(self, index: int, answer: Answer) -> bytes: ...

    def end(self, answers: list[Answer]) -> bytes: ...

    def fail(self, error: ApiError, request_id: str) -> bytes:
        """The events that report an error once the status line is sent."""
        ...


class CountRoutes(NamedTuple):
    """The routes that count the tokens of a prompt."""

    paths: tuple[str, ...]
    """As in `Dialect.paths`."""
    field: str
    """The field of the response that holds the number."""


class Dialect(Protocol):
    name: str
    """Name of the dialect in metrics and traces."""

    paths: tuple[str, ...]
    """The paths that answer with turns, in the form of routes."""

    count: CountRoutes | None
    """None: the API of this dialect counts no tokens."""

    schema_fields: frozenset[str]
    """Fields of `UNSUPPORTED_FIELDS` that make answers follow a schema. The dialect reads them for runs whose
    engines follow grammars."""

    done_fields: frozenset[str]
    """Fields of `UNSUPPORTED_FIELDS` that this dialect supports, although others do not."""

    has_ids: bool
    """Whether prompts may be lists of token ids. A body may have any number of these, unlike of other
    values."""

    header: bytes | None
    """A header that all clients of this dialect send, and no others; None: there is none."""

    overflow: tuple[str, str]
    """The provider's sentence for a prompt that leaves no room for an answer, and the field with the prompt.
    Agents recognise the sentence, and shorten their history. It may name the prompt's number of `{tokens}`,
    the size of the context `{window}`, the `{most}` tokens that a prompt may have, and the field as
    `{param}`."""

    def read(self, body: Body, path: str) -> Body:
        """The body in the form that the other methods expect: with model and stream, which the path may
        contain, and with the field names of `UNSUPPORTED_FIELDS`. Raises ApiError."""
        ...

    def parse(self, body: Body, session: Session, is_multimodal: bool = False) -> list[TurnRequest]:
        """The requests of a body, one per prompt, for a policy that `is_multimodal` with images. Raises
        ApiError."""
        ...

    def reply(self, body: Body, turn_id: str, session: Session) -> Reply:
        """`turn_id` is that of the request's first turn. `body` was parsed without an error."""
        ...

    def error_body(self, error: ApiError, request_id: str) -> dict[str, Any]: ...

    def model_entry(self, model: str) -> dict[str, Any]: ...

    def model_list(self, models: list[str]) -> dict[str, Any]: ...


def data_event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def encode_event(body: dict[str, Any]) -> bytes:
    return b"event: " + body["type"].encode() + b"\n" + data_event(body)
