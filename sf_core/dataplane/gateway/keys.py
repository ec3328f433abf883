"""The sender of a request: the key that it shows and the session that it names.

A key is given as bearer token, in `x-api-key` or `x-goog-api-key`, and to the agents' APIs also as `key` in
the query. What follows its last colon, if anything, is a session id: `KEY:SESSION`, or `session:SESSION`
where no key is asked for. The data plane's own key opens every route, a run's key the agents' routes of
that run.
"""

from __future__ import annotations

import hmac
import urllib.parse
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import orjson
from starlette.types import ASGIApp, Receive, Scope, Send

from sf_core.dataplane.bodies import RunSpec
from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.gateway.dialects.registry import AGENTS_PATH, dialect_of, is_for_agents
from sf_core.dataplane.gateway.endpoint import send_body

KEY_HEADERS = (b"x-api-key", b"x-goog-api-key", b"authorization")
"""The first that is sent counts."""


@dataclass(frozen=True, slots=True)
class Caller:
    given: bytes = field(repr=False)
    """The whole key, as sent."""
    plane_key: bytes | None = field(repr=False)
    named_session: str | None
    """Session id of the `x-session-id` header."""

    @classmethod
    def of(cls, scope: Scope, plane_key: bytes | None) -> Caller:
        headers = dict(scope["headers"])
        given = next(filter(None, map(headers.get, KEY_HEADERS)), b"").removeprefix(b"Bearer ")
        if not given and AGENTS_PATH.fullmatch(scope["path"]):
            given = dict(urllib.parse.parse_qsl(scope.get("query_string", b""))).get(b"key", b"")
        named = headers.get(b"x-session-id")
        return cls(given, plane_key, None if named is None else named.decode("latin-1"))

    @property
    def is_operator(self) -> bool:
        """Whether it may use every route."""
        return self.plane_key is None or self._shows(self.plane_key)

    def may_use(self, spec: RunSpec) -> bool:
        """Whether it may act as an agent of the run."""
        key = spec.agents_key
        if self.plane_key is not None and self._shows(self.plane_key):
            return True
        return self.plane_key is None if key is None else self._shows(key.encode())

    def session_id(self, scope: Scope) -> str | None:
        """The session id in the URL, else in the header, else in the key."""
        in_path = scope["path_params"].get("session_id")
        is_whole_key = self.plane_key is not None and hmac.compare_digest(self.given, self.plane_key)
        first, last = (b"", b"") if is_whole_key else self._halves()
        return in_path or self.named_session or (last.decode("latin-1") if first else None)

    def _shows(self, key: bytes) -> bool:
        # both are always compared, so that the time taken tells nothing about the key
        whole = hmac.compare_digest(self.given, key)
        first = hmac.compare_digest(self._halves()[0], key)
        # an empty key opens nothing
        return bool(key) and (whole or first)

    def _halves(self) -> tuple[bytes, bytes]:
        first, _, last = self.given.rpartition(b":")
        return first, last


class KeyCheck:
    """Middleware that checks every request and puts the Caller into the scope of those it lets through."""

    def __init__(self, app: ASGIApp, key: str | None, specs: Callable[[], Iterable[RunSpec]]) -> None:
        self._app = app
        self._key = None if key is None else key.encode()
        self._specs = specs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        caller = Caller.of(scope, self._key)
        if caller.is_operator or self._is_agent(scope, caller):
            await self._app({**scope, "caller": caller}, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            error = wrong_key()
            body = dialect_of(scope).error_body(error, scope["request_id"])
            await send_body(send, error.status, orjson.dumps(body))

    def _is_agent(self, scope: Scope, caller: Caller) -> bool:
        is_agents_route = scope["type"] == "http" and is_for_agents(scope["path"])
        return is_agents_route and any(map(caller.may_use, self._specs()))


def wrong_key() -> ApiError:
    # by these words LiteLLM knows that it is the key
    return ApiError(401, "Incorrect API key provided: it is missing or wrong.", code="invalid_api_key")
