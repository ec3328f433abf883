"""A policy without a network: an HTTP server that gives the same answer to every request, in the dialects of
the data plane. It reads requests as the data plane does, and so refuses the same ones, but renders none."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sf_core.cli.serving.app_thread import serve_app
from sf_core.config import RunConfig
from sf_core.dataplane.chat.messages import assistant_message
from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.gateway.access import Caller, Keys
from sf_core.dataplane.gateway.dialects.checks import parse_object, refuse_unsupported_fields
from sf_core.dataplane.gateway.dialects.protocol import Dialect, Reply
from sf_core.dataplane.gateway.dialects.registry import APIS, DIALECTS, SESSION, SESSIONS, dialect_of
from sf_core.dataplane.gateway.normalisation import normalise
from sf_core.dataplane.sessions.session import Session
from sf_core.dataplane.turns.answer import Answer, Pieces
from sf_core.engines.registry import follows_grammars
from sf_core.types import Endpoint

NAME = "policy"
"""Name of the model, as in a run."""

MOST_ANSWERS = 64
"""Answers of a session, after which requests are refused: some agents ask until an answer fits."""

Answering = Callable[[Request], Awaitable[Response]]

_TURN = "scripted"
_NUM_TOKENS = 1


class ScriptedPolicy:
    def __init__(self, config: RunConfig, answer: str) -> None:
        self._config = config
        self._answer = answer
        self._key = secrets.token_urlsafe(24)
        self.num_answers = 0

    @contextmanager
    def serve(self) -> Iterator[Endpoint]:
        """Serve it on a port of this machine."""
        with serve_app(self._app()) as url:
            yield Endpoint(f"{url}{SESSIONS}/{_TURN}/v1", self._key, NAME)

    def _app(self) -> Starlette:
        posts: dict[str, Answering] = {}
        for dialect in DIALECTS:
            posts |= dict.fromkeys(dialect.paths, self._endpoint(dialect))
            if (count := dialect.count) is not None:
                posts |= dict.fromkeys(count.paths, _counting(count.field))
        routes = [
            *(Route(SESSION + path, endpoint, methods=["POST"]) for path, endpoint in posts.items()),
            *(Route(f"{SESSION}{api}models", _list_models) for api in APIS),
            *(Route(f"{SESSION}{api}models/{{name:path}}", _show_model) for api in APIS),
        ]
        return Starlette(routes=routes, exception_handlers={ApiError: _refuse})

    def _endpoint(self, dialect: Dialect) -> Answering:
        async def answer(request: Request) -> Response:
            caller = Caller.from_scope(request.scope, Keys(self._key))
            if not caller.is_operator:
                raise caller.refusal()
            body, answers = self._read(dialect, await request.body(), request.url.path)
            if self.num_answers >= MOST_ANSWERS:
                raise ApiError(429, f"The scripted policy gives {MOST_ANSWERS} answers per session.")
            self.num_answers += 1
            reply = dialect.reply(body, _TURN, Session(_TURN))
            if body.get("stream"):
                return Response(_stream(reply, answers), media_type="text/event-stream")
            return Response(reply.whole(answers), media_type="application/json")

        return answer

    def _read(self, dialect: Dialect, data: bytes, path: str) -> tuple[dict[str, Any], list[Answer]]:
        """The body, and the answers to its prompts. Raises ApiError as the data plane does."""
        rules = self._config.rollout
        done = dialect.done_fields
        if follows_grammars(self._config):
            done |= dialect.schema_fields
        parsed, _ = parse_object(data, dialect.has_ids)
        body = refuse_unsupported_fields(dialect.read(parsed, path), rules.ignored_fields, done)
        body = normalise(body, rules.normalised)
        message = assistant_message(self._answer, [], _TURN)
        answers = [
            Answer(_TURN, message, "stop", None, _NUM_TOKENS, _NUM_TOKENS, [] if request.logprobs else None)
            for request in dialect.parse(body, Session(_TURN), is_multimodal=True)
            for _ in range(request.num_samples)
        ]
        return body, answers


def _stream(reply: Reply, answers: list[Answer]) -> bytes:
    sent = [reply.start(_NUM_TOKENS)]
    for i, answer in enumerate(answers):
        sent.append(reply.piece(i, Pieces([answer.content], answer.logprobs)))
    for i, answer in enumerate(answers):
        sent.append(reply.end_turn(i, answer))
    sent.append(reply.end(answers))
    return b"".join(sent)


def _counting(field: str) -> Answering:
    async def count(request: Request) -> Response:
        return _json({field: _NUM_TOKENS})

    return count


async def _list_models(request: Request) -> Response:
    return _json(dialect_of(request.scope).model_list([NAME]))


async def _show_model(request: Request) -> Response:
    return _json(dialect_of(request.scope).model_entry(NAME))


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    response = _json(dialect_of(request.scope).error_body(error, _TURN), error.status)
    # the SDKs would repeat the request otherwise
    response.headers["x-should-retry"] = "false"
    return response


def _json(content: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")
