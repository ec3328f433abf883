"""The agents' routes and the error responses of all routes.

Owns paths and error bodies; endpoint.py and the dialects own how a request is answered.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sf_core.dataplane.errors import RETRY_AFTER_S, ApiError, EngineFailed, is_temporary, remedy
from sf_core.dataplane.gateway.access import Lookup, no_model
from sf_core.dataplane.gateway.dialects.registry import APIS, DIALECTS, SESSION, dialect_of
from sf_core.dataplane.gateway.endpoint import ID_HEADERS, RequestOrder, TokenCountEndpoint, TurnEndpoint


def agent_routes(sessions: Lookup[Any]) -> list[Route]:
    """The routes that SDKs expect, for the whole data plane and for one session."""
    order = RequestOrder()
    return [*_routes_below("", sessions, order), *_routes_below(SESSION, sessions, order)]


def _routes_below(prefix: str, sessions: Lookup[Any], order: RequestOrder) -> list[Route]:
    def list_served(request: Request) -> list[str]:
        caller = request.scope["caller"]
        return sessions.list_models(caller)

    async def models(request: Request) -> Response:
        return _json(dialect_of(request.scope).model_list(list_served(request)))

    async def model(request: Request) -> Response:
        name = request.path_params["model"]
        if name not in list_served(request):
            raise no_model(name)
        return _json(dialect_of(request.scope).model_entry(name))

    posts: dict[str, TurnEndpoint | TokenCountEndpoint] = {}
    for dialect in DIALECTS:
        posts |= dict.fromkeys(dialect.paths, TurnEndpoint(dialect, sessions.find_session, order))
        if (count := dialect.count) is not None:
            counter = TokenCountEndpoint(dialect, count.field, sessions.find_session)
            posts |= dict.fromkeys(count.paths, counter)
    return [
        *(Route(prefix + path, endpoint, methods=["POST"]) for path, endpoint in posts.items()),
        *(Route(prefix + api + "models", models) for api in APIS),
        *(Route(prefix + api + "models/{model:path}", model) for api in APIS),
    ]


def _json(body: dict[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


async def _refuse(request: Request, error: Exception, headers: Mapping[str, str] | None = None) -> Response:
    assert isinstance(error, ApiError)
    if error.retry_after_s is not None:
        headers = {"Retry-After": str(error.retry_after_s)}
    elif isinstance(error, EngineFailed) and error.is_poison:
        # otherwise the SDKs of OpenAI and Anthropic retry after a 502
        headers = {"x-should-retry": "false"}
    body = dialect_of(request.scope).error_body(error, request.scope["request_id"])
    return _json(body, error.status, headers)


async def _fail(request: Request, error: Exception) -> Response:
    if isinstance(error, OSError) and is_temporary(error):
        help_ = remedy(error, "Free space or repair the disk")
        message = f"The data plane cannot use its disk: {error}. {help_}, then send the request again."
        response = await _refuse(request, ApiError(503, message, retry_after_s=RETRY_AFTER_S))
    else:
        response = await _refuse(request, ApiError(500, f"The data plane failed: {type(error).__name__}."))
    # the server closes the connection after an unexpected exception, so a client must not reuse it
    response.headers["Connection"] = "close"
    # no middleware sees this response
    for name in ID_HEADERS:
        response.headers[name.decode()] = request.scope["request_id"]
    return response


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
