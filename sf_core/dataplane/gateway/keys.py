"""The sender of a request: the key that it shows, the session that it names, and what it may do.

| who | may |
|---|---|
| the operator: shows the data plane's key | use every route |
| a client: shows the key of the run; where the data plane has the account's key, also nobody's key | open
sessions and groups of the run, work with these, and take turns outside of sessions |
| an agent: shows the key of a session | ask for turns, token counts and models in that session |

A key is given as bearer token, in `x-api-key` or `x-goog-api-key`, and to the agents' APIs also as `key` in
the query. What follows its last colon, if anything, is a session id: `KEY:SESSION`, or `session:SESSION`
where no key is asked for.
"""

from __future__ import annotations

import hmac
import re
import urllib.parse
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache

import orjson
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from sf_core.dataplane.api_schemas import RunSpec
from sf_core.dataplane.connections import note_caller
from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.gateway.dialects.registry import (
    AGENTS_PATH,
    dialect_of,
    is_for_clients,
    named_in_path,
)
from sf_core.dataplane.gateway.endpoint import send_body
from sf_core.dataplane.gateway.pages import explain_page
from sf_core.dataplane.sessions.session import Session
from sf_core.own_addresses import OwnAddresses

KEY_HEADERS = (b"x-api-key", b"x-goog-api-key", b"authorization")
"""The first of these headers that a request has counts."""

# RFC 9110, section 11: a scheme has no case, and spaces may follow
_SCHEME = re.compile(rb"\Abearer +", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a data plane."""

    operator: str = field(repr=False)
    """The key that opens every route."""
    welcomes_strangers: bool = False
    """Whether callers without a valid key are clients of the runs that have no key."""
    addresses: OwnAddresses = field(default_factory=OwnAddresses)
    """Addresses at which callers without a key may reach the data plane."""

    def of_session(self, spec: RunSpec, session_id: str) -> str:
        """Key of one session of a run. A restart of the data plane does not change the key; a run that starts
        over has other keys."""
        return _derive(self.operator, f"{spec.run_id}\n{spec.origin}\n{session_id}")


@lru_cache(maxsize=2**14)
def _derive(key: str, text: str) -> str:
    return "sf-" + hmac.digest(key.encode(), text.encode(), "sha256").hex()[:40]


@dataclass(frozen=True, slots=True)
class Caller:
    scope: Scope = field(repr=False)
    sent_key: bytes = field(repr=False)
    """The whole key, as sent."""
    keys: Keys
    named_session: str | None
    """Session id in the URL, else in the `x-session-id` header, else in the key."""

    @classmethod
    def from_scope(cls, scope: Scope, keys: Keys) -> Caller:
        headers = dict(scope["headers"])
        path = scope["path"]
        header = next(filter(None, map(headers.get, KEY_HEADERS)), b"")
        sent_key = _SCHEME.sub(b"", header)
        if not sent_key and AGENTS_PATH.fullmatch(path):
            query = urllib.parse.parse_qsl(scope.get("query_string", b""))
            sent_key = dict(query).get(b"key", b"")
        session_id = named_in_path(path)
        if not session_id:
            named = headers.get(b"x-session-id")
            if named is None and not _equals_key(sent_key, keys.operator):
                named = _session_in_key(sent_key)
            session_id = None if named is None else named.decode("latin-1")
        return cls(scope, sent_key, keys, session_id)

    @property
    def is_operator(self) -> bool:
        return self._shows(self.keys.operator)

    def is_client_of(self, spec: RunSpec) -> bool:
        """Whether the caller may open sessions and groups of the run, and take turns outside of sessions."""
        if self.is_operator:
            return True
        return self.is_welcome if spec.clients_key is None else self._shows(spec.clients_key)

    @property
    def fault(self) -> str | None:
        """Why a caller without a key is refused: it may be a web page. None if it cannot be one."""
        return explain_page(Headers(scope=self.scope), self.keys.addresses)

    @property
    def is_welcome(self) -> bool:
        """Whether the caller is a client of the runs that have no key, whichever key it shows."""
        return self.keys.welcomes_strangers and self.fault is None

    def is_agent_of(self, spec: RunSpec, session_id: str) -> bool:
        """Whether the caller shows the key of this session."""
        return self._shows(self.keys.of_session(spec, session_id))

    def shows_key_of(self, spec: RunSpec) -> bool:
        """Whether the caller shows the key of the run, or the key of the session that it names."""
        named = self.named_session
        is_agent = named is not None and self.is_agent_of(spec, named)
        return is_agent or (spec.clients_key is not None and self._shows(spec.clients_key))

    def owns(self, spec: RunSpec, session: Session) -> bool:
        """Whether the caller may read, reward and finish the session. The operator may; in a session that a
        client opened, the clients of the run may too."""
        is_clients_session = session.is_external and not session.by_operator
        return self.is_operator or (is_clients_session and self.is_client_of(spec))

    def works_in(self, spec: RunSpec, session: Session) -> bool:
        """Whether the caller may ask for turns in the session."""
        return self.is_agent_of(spec, session.session_id) or self.owns(spec, session)

    def refusal(self) -> ApiError:
        """The error for a request that the caller may not send."""
        if self.keys.welcomes_strangers and (fault := self.fault) is not None:
            return ApiError(403, fault, code="foreign_page")
        # LiteLLM recognises a wrong key by these words
        return ApiError(401, "Incorrect API key provided: it is missing or wrong.", code="invalid_api_key")

    def _shows(self, key: str) -> bool:
        # both are always compared, so that the time taken tells nothing about the key
        return _equals_key(self.sent_key, key) | _equals_key(self.sent_key.rpartition(b":")[0], key)


def _session_in_key(sent_key: bytes) -> bytes | None:
    """The session id after the last colon of a key; None without a colon."""
    key, _, session_id = sent_key.rpartition(b":")
    return session_id if key else None


def _equals_key(sent_key: bytes, key: str) -> bool:
    # an empty key opens nothing
    return hmac.compare_digest(sent_key, key.encode()) and bool(key)


class KeyMiddleware:
    """Middleware that checks every request and puts the Caller into the scope of those it lets through."""

    def __init__(self, app: ASGIApp, keys: Keys, specs: Callable[[], Iterable[RunSpec]]) -> None:
        self._app = app
        self._keys = keys
        self._specs = specs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        caller = Caller.from_scope(scope, self._keys)
        if self._may_pass(scope, caller):
            await self._app({**scope, "caller": caller}, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            error = caller.refusal()
            body = dialect_of(scope).error_body(error, scope["request_id"])
            await send_body(send, error.status, orjson.dumps(body))

    def _may_pass(self, scope: Scope, caller: Caller) -> bool:
        """Whether some route may answer. Lookup decides about the session."""
        if scope["type"] == "websocket":
            # engines are not web pages, so a page is refused whichever key it shows
            origin = self._keys.addresses.find_foreign_origin(Headers(scope=scope))
            return caller.is_operator and origin is None
        is_open_to_clients = is_for_clients(scope["path"])
        shows_run_key = is_open_to_clients and any(map(caller.shows_key_of, self._specs()))
        shows_key = caller.is_operator or shows_run_key
        may_pass = shows_key or (is_open_to_clients and caller.is_welcome)
        if may_pass:
            note_caller(scope, shows_key=shows_key)
        return may_pass
