"""A control route: a handler, what it takes from a request, and what openapi.py describes.

A handler may have the parameters `plane`, `request`, those of the path, `run` and `session` if the path names
them, `body`, parsed as the model that annotates it, and `wait_s`, the longest wait in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, get_type_hints

import msgspec
import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sf_core.dataplane.bodies import MAX_INDEX
from sf_core.dataplane.control.plane import DataPlane
from sf_core.dataplane.errors import ApiError, WrongField
from sf_core.dataplane.gateway.dialects.checks import parse_json
from sf_core.dataplane.gateway.endpoint import read_body
from sf_core.dataplane.large import apart, is_large_body

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
        *refusals: int,
        recorded: bool = False,
        confirmed: bool = False,
        answers: str = JSON,
    ) -> None:
        """`refusals` are error statuses beside those that follow from the rest. A recorded route answers 503
        once the journal of its run cannot be written; what the request has begun then goes on in the
        background until it can. A confirmed route answers 409 if a later attempt of its run has begun
        (ServedRun.confirm). `answers` is a media type."""
        super().__init__(path, self._answer, methods=[method])
        self.method = method
        self.summary = summary
        self.refusals = refusals
        self.recorded = recorded
        self.confirmed = confirmed
        self.answers = answers
        self.takes: dict[str, Any] = get_type_hints(handler)
        """Types of the handler's parameters by name."""
        self.takes.pop("return")
        self._handler = handler

    async def _answer(self, request: Request) -> Response:
        given = await self._read(request)
        answering = self._handler(**{name: given[name] for name in self.takes})
        answer = await (given["run"].journal.attend(answering) if self.recorded else answering)
        if self.confirmed:
            await given["run"].confirm()
        if isinstance(answer, Response):
            return answer
        # messages may hold integers of any size
        return Response(msgspec.json.encode(answer or {}), media_type=JSON)

    async def _read(self, request: Request) -> dict[str, Any]:
        """All that a handler may take."""
        plane: DataPlane = request.app.state.plane
        given = {"plane": plane, "request": request, **request.path_params}
        if "session" in self.takes:
            given["run"], given["session"] = plane.find_session(given["session_id"], request.scope["caller"])
        if "body" in self.takes:
            data = await read_body(request.receive)
            given["body"] = await apart(is_large_body(data), _parse_body, self.takes["body"], data)
        if "wait_s" in self.takes:
            given["wait_s"] = _parse_wait_s(request.query_params.get("wait_s", "0"))
        if given.get("index", 0) > MAX_INDEX:
            raise ApiError(404, f"The number of a batch or version must be at most {MAX_INDEX}.")
        if "run_id" in given and ("run" in self.takes or self.recorded):
            given["run"] = plane.run(given["run_id"])
        return given


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
