"""The interface of a dialect: parses request bodies, writes answers whole or as a stream of events.

`whole`, `started`, `piece`, `turn_ended`, `ended` and `failed` return bytes of an HTTP body.
"""

from __future__ import annotations

from typing import Any, Protocol

import orjson

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

    def started(self, num_prompt_tokens: int) -> bytes: ...

    def piece(self, index: int, pieces: Pieces) -> bytes: ...

    def turn_ended(self, index: int, answer: Answer) -> bytes: ...

    def ended(self, answers: list[Answer]) -> bytes: ...

    def failed(self, error: ApiError) -> bytes:
        """The event that reports an error once the status line is sent."""
        ...


class Dialect(Protocol):
    name: str
    """Its name in metrics and traces."""

    def parse(self, body: Body, session: Session) -> list[TurnRequest]:
        """The requests of a body, one per prompt. Raises ApiError."""
        ...

    def reply(self, body: Body, turn_id: str, session: Session) -> Reply:
        """`turn_id` is that of the request's first turn. `body` was parsed without an error."""
        ...

    def error_body(self, error: ApiError) -> dict[str, Any]: ...

    def model_list(self, models: list[str]) -> dict[str, Any]: ...


def data_event(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


def named_event(body: dict[str, Any]) -> bytes:
    return b"event: " + body["type"].encode() + b"\n" + data_event(body)
