"""The agents' routes and the error responses of all routes, in every process that serves turns.

Owns paths and error bodies; endpoint.py and the dialects own how a request is answered.
"""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sf_core.dataplane.errors import RETRY_AFTER_S, ApiError
from sf_core.dataplane.gateway.dialects.registry import DIALECTS, dialect_of
from sf_core.dataplane.gateway.endpoint import TokenCount, Turns
from sf_core.dataplane.gateway.lookup import Lookup, no_model

SESSION = "/sessions/{session_id}"

Answer = dict[str, Any]

_OF_A_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS}


def agent_routes(sessions: Lookup[Any]) -> list[Route]:
    """The routes below /v1 that SDKs expect, for the whole data plane and for one session."""
    return [*_routes_below("", sessions), *_routes_below(SESSION, sessions)]


def _routes_below(prefix: str, sessions: Lookup[Any]) -> list[Route]:
    async def models(request: Request) -> Answer:
        caller = request.scope["caller"]
        names = sessions.served_models(caller.session_id(request.scope), caller)
        return dialect_of(request.scope).model_list(names)

    async def model(request: Request) -> Answer:
        caller, name = request.scope["caller"], request.path_params["model"]
        if name not in sessions.served_models(caller.session_id(request.scope), caller):
            raise no_model(name)
        entry: Answer = dialect_of(request.scope).model_list([name])["data"][0]
        return entry

    turns = [
        Route(prefix + path, Turns(dialect, sessions.find_session), methods=["POST"])
        for path, dialect in DIALECTS.items()
    ]
    count = TokenCount(DIALECTS["/v1/messages"], sessions.find_session)
    return [
        *turns,
        Route(prefix + "/v1/messages/count_tokens", count, methods=["POST"]),
        json_route(prefix + "/v1/models", models, "GET"),
        json_route(prefix + "/v1/models/{model:path}", model, "GET"),
    ]


def json_route(path: str, answer: Callable[[Request], Awaitable[Answer]], method: str) -> Route:
    async def endpoint(request: Request) -> Response:
        return Response(orjson.dumps(await answer(request)), media_type="application/json")

    return Route(path, endpoint, methods=[method])


async def _refuse(request: Request, error: Exception, headers: Mapping[str, str] | None = None) -> Response:
    assert isinstance(error, ApiError)
    if error.retry_after_s is not None:
        headers = {"Retry-After": str(error.retry_after_s)}
    body = dialect_of(request.scope).error_body(error)
    return Response(orjson.dumps(body), error.status, headers, media_type="application/json")


async def _fail(request: Request, error: Exception) -> Response:
    if isinstance(error, OSError) and error.errno in _OF_A_DISK:
        message = f"The data plane cannot use its disk: {error}. Make room there or mend it, then ask again."
        return await _refuse(request, ApiError(503, message, retry_after_s=RETRY_AFTER_S))
    return await _refuse(request, ApiError(500, f"The data plane failed: {type(error).__name__}."))


async def _refuse_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}."
    # the headers of a 405 name the allowed methods
    return await _refuse(request, ApiError(error.status_code, message), error.headers)


REFUSALS: Mapping[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
    ApiError: _refuse,
    HTTPException: _refuse_route,
    Exception: _fail,
}
"""Starlette's exception handlers."""
