"""Declares control routes as FastAPI does, without its cost on `/claim` and `/finished`. openapi.py describes
what is declared.

A handler asks for what it needs by the names of its parameters: those of the path, `plane`, `request`,
`caller`, `run` and `session` if the path names them, `body`, parsed as the model that annotates it, and
`wait_s`, the longest wait in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, get_type_hints

import msgspec
import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sf_core.dataplane.api_schemas import MAX_INDEX
from sf_core.dataplane.control.plane import DataPlane
from sf_core.dataplane.errors import ApiError, WrongField
from sf_core.dataplane.gateway.access import Caller
from sf_core.dataplane.gateway.dialects.checks import parse_json
from sf_core.dataplane.gateway.endpoint import read_body
from sf_core.dataplane.large_requests import in_thread_if, is_large_body

Answer = Mapping[str, Any]
Handler = Callable[..., Awaitable[Answer | Response | None]]
"""None: the answer is an empty object."""

JSON = "application/json"

MAX_WAIT_S = 30.0


class ControlRoute(Route):
    def __init__(
        self,
        method: str,
        path: str,
        summary: str,
        handler: Handler,
        *,
        refusals: Collection[int] = (),
        recorded: bool = False,
        confirmed: bool = False,
        media_type: str = JSON,
    ) -> None:
        """`refusals` are error statuses beside those that follow from the rest. A recorded route answers 503
        once the journal of its run cannot be written; what the request has begun then goes on in the
        background until it can. A confirmed route answers 409 if a later attempt of its run has begun
        (ServedRun.confirm). `media_type` is that of the answer."""
        super().__init__(path, self._answer, methods=[method])
        self.method = method
        self.summary = summary
        self.refusals = refusals
        self.recorded = recorded
        self.confirmed = confirmed
        self.media_type = media_type
        self.parameters: dict[str, Any] = get_type_hints(handler)
        """Types of the handler's parameters by name."""
        self.parameters.pop("return")
        self._handler = handler

    async def _answer(self, request: Request) -> Response:
        values = await self._read(request)
        answering = self._handler(**{name: values[name] for name in self.parameters})
        answer = await (values["run"].journal.await_unless_failing(answering) if self.recorded else answering)
        if self.confirmed:
            await values["run"].confirm()
        if isinstance(answer, Response):
            return answer
        # messages may hold integers of any size
        return Response(msgspec.json.encode(answer or {}), media_type=JSON)

    async def _read(self, request: Request) -> dict[str, Any]:
        """All that a handler may ask for, by name."""
        plane: DataPlane = request.app.state.plane
        caller: Caller = request.scope["caller"]
        values = {"plane": plane, "request": request, "caller": caller, **request.path_params}
        if "session" in self.parameters:
            values["run"], values["session"] = plane.find_session(values["session_id"], caller)
        if "body" in self.parameters:
            data = await read_body(request.receive)
            values["body"] = await in_thread_if(
                is_large_body(data), _parse_body, self.parameters["body"], data
            )
        if "wait_s" in self.parameters:
            values["wait_s"] = _parse_wait_s(request.query_params.get("wait_s", "0"))
        if values.get("index", 0) > MAX_INDEX:
            raise ApiError(404, f"The number of a batch or version must be at most {MAX_INDEX}.")
        if "run_id" in values and ("run" in self.parameters or self.recorded):
            values["run"] = plane.run(values["run_id"])
        return values


class ControlRouter:
    """Decorators of handlers, and the routes that they declare. Options are those of ControlRoute."""

    def __init__(self) -> None:
        self.routes: list[ControlRoute] = []

    def get(self, path: str, summary: str, **options: Any) -> Callable[[Handler], Handler]:
        return self._declare("GET", path, summary, options)

    def post(self, path: str, summary: str, **options: Any) -> Callable[[Handler], Handler]:
        return self._declare("POST", path, summary, options)

    def _declare(
        self, method: str, path: str, summary: str, options: dict[str, Any]
    ) -> Callable[[Handler], Handler]:
        def add_route(handler: Handler) -> Handler:
            self.routes.append(ControlRoute(method, path, summary, handler, **options))
            return handler

        return add_route


def _parse_body(model: type[BaseModel], data: bytes) -> BaseModel:
    value, _ = parse_json(data or b"{}")
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError:  # the journal could not hold it either
        raise ApiError(400, "The request body has an integer of more than 64 bits.") from None
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "body"
        raise WrongField(where, f"{where}: {first['msg']}") from None


def _parse_wait_s(text: str) -> float:
    try:
        wait_s = float(text)
    except ValueError:
        wait_s = math.nan
    if math.isnan(wait_s):
        raise WrongField("wait_s", f"wait_s must be a number, got {text!r}")
    return min(max(wait_s, 0.0), MAX_WAIT_S)
