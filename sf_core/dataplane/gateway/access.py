"""The access of a request: the key that it shows, what its sender may do, and the run and session that it is
for, by the session or model that it names.

The page of a stranger in the user's browser can send requests too. With a valid key this does not matter,
because no page has one.
"""

from __future__ import annotations

import hmac
import itertools
import re
import urllib.parse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Generic, Protocol, TypeVar

import orjson
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from sf_core.config.addresses import OwnAddresses
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
from sf_core.dataplane.sessions.session import Session
from sf_core.dataplane.turns.live_turn import LiveTurns


def explain_page(headers: Mapping[str, str], own: OwnAddresses) -> str | None:
    """Why the request may come from a page of another site, in one sentence; None if it cannot."""
    if (host := own.find_foreign_host(headers)) is not None:
        return (
            "The data plane answers requests without a valid key only under a loopback name, not under "
            f"{host!r}: send a key, or start the data plane with this host in SF_ALLOWED_HOSTS."
        )
    if (origin := own.find_foreign_origin(headers)) is not None:
        return (
            f"The request comes from a web page of another origin ({origin}) and shows no valid key: send a "
            "key, or start the data plane with the address of the page in SF_ALLOWED_HOSTS."
        )
    media_type = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        return (
            f"A request without a valid key must have the content type application/json, not {media_type!r}: "
            "add the header `content-type: application/json`."
        )
    return None


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


class Run(Protocol):
    """The parts of a run that requests of agents use."""

    @property
    def turns(self) -> LiveTurns: ...

    @property
    def released(self) -> bool: ...

    def refusal(self) -> ApiError: ...


Host = TypeVar("Host", bound=Run)


class Lookup(Generic[Host]):
    def __init__(self, runs: dict[str, Host]) -> None:
        """`runs` may change at any time."""
        self._runs = runs
        self._unnamed_numbers = itertools.count(1)

    def find_session(self, scope: Scope, model: str) -> tuple[LiveTurns, Session]:
        """The session of a request. Without a session id it is a new external one, for this request alone, of
        the newest run that serves this model. Raises ApiError, 503 if all runs that serve the model have
        ended."""
        caller: Caller = scope["caller"]
        if caller.named_session is None:
            usable = self._usable_runs(caller)
            serving = [run for run in usable if run.turns.spec.served_model == model]
            if not serving:
                models = sorted({run.turns.spec.served_model for run in usable})
                remedy = "; `sf serve RUN` serves the policy of a run that has ended"
                raise no_model(model, f"; existing models: {', '.join(models)}" if models else remedy)
            run = min(serving, key=lambda run: run.released)
            if run.released:
                raise run.refusal()
            return run.turns, Session(f"{run.turns.spec.run_id}.adhoc.{next(self._unnamed_numbers)}")
        run, session = self._find_named(caller.named_session, caller, caller.works_in)
        if model != run.turns.spec.served_model:
            raise no_model(model)
        return run.turns, session

    def owned_session(self, session_id: str, caller: Caller) -> tuple[Host, Session]:
        """An open session that the caller may read, reward and finish, and its run. Raises ApiError 404, and
        401 if the caller may not."""
        return self._find_named(session_id, caller, caller.owns)

    def list_models(self, caller: Caller) -> list[str]:
        """Names of the models that the caller may use, in its session if it names one."""
        if caller.named_session is not None:
            run, _ = self._find_named(caller.named_session, caller, caller.works_in)
            return [run.turns.spec.served_model]
        return sorted({run.turns.spec.served_model for run in self._usable_runs(caller)})

    def _usable_runs(self, caller: Caller) -> list[Host]:
        """The runs of which the caller is a client, newest first. Raises ApiError 401 if there are only other
        runs."""
        usable = [run for run in reversed(self._runs.values()) if caller.is_client_of(run.turns.spec)]
        if self._runs and not usable:
            raise caller.refusal()
        return usable

    def _find_named(
        self, session_id: str, caller: Caller, is_allowed: Callable[[RunSpec, Session], bool]
    ) -> tuple[Host, Session]:
        for run in self._runs.values():
            if (session := run.turns.sessions.get(session_id)) is not None:
                if not is_allowed(run.turns.spec, session):
                    raise caller.refusal()
                return run, session
        if not self._may_know(session_id, caller):
            raise caller.refusal()
        raise no_session(session_id)

    def _may_know(self, session_id: str, caller: Caller) -> bool:
        """Whether the caller may learn that a session does not exist."""
        specs = [run.turns.spec for run in self._runs.values()]
        is_known = any(caller.is_client_of(spec) or caller.is_agent_of(spec, session_id) for spec in specs)
        return is_known or caller.is_operator or caller.is_welcome


def no_session(session_id: str) -> ApiError:
    return ApiError(404, f"Session {session_id} is unknown or has ended.", code="session_not_found")


def no_model(model: str, remedy: str = "") -> ApiError:
    message = f"The model {model!r} does not exist here{remedy}."
    return ApiError(404, message, code="model_not_found", param="model")
