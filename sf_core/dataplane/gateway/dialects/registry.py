"""The dialects, and the paths of agents' requests in each of them."""

from __future__ import annotations

import re

from starlette.routing import compile_path
from starlette.types import Scope

from sf_core.dataplane.gateway.dialects.anthropic import Anthropic
from sf_core.dataplane.gateway.dialects.chat import Chat
from sf_core.dataplane.gateway.dialects.completions import Completions
from sf_core.dataplane.gateway.dialects.google import Google
from sf_core.dataplane.gateway.dialects.protocol import Dialect
from sf_core.dataplane.gateway.dialects.responses import Responses

DIALECTS: tuple[Dialect, ...] = (Chat(), Completions(), Responses(), Anthropic(), Google())
"""The first dialect lists models and words errors if nothing tells the dialect of the client."""

APIS = tuple(dict.fromkeys(f"/{path.split('/')[1]}/" for dialect in DIALECTS for path in dialect.paths))
"""Beginnings of the paths of the agents' APIs: a version."""

SESSIONS = "/sessions"
SESSION = SESSIONS + "/{session_id}"
GROUPS = "/runs/{run_id}/groups"

AGENTS_PATH = re.compile(f"(?:{SESSIONS}/(?P<session_id>[^/]+))?(?P<below>(?:{'|'.join(APIS)}).+)", re.DOTALL)
"""Paths of the agents' API, for the whole data plane or for one session."""


def is_for_clients(path: str) -> bool:
    """Whether others than the operator may use the path: the agents' APIs, the commands on sessions, and the
    declaration of groups."""
    is_of_sessions = path == SESSIONS or path.startswith(f"{SESSIONS}/")
    return path.startswith(APIS) or is_of_sessions or _GROUPS_PATH.match(path) is not None


def named_in_path(path: str) -> str | None:
    """Id of the session that the path names; None if it names none."""
    match = _SESSION_PATH.match(path)
    return match[1] if match else None


_GROUPS_PATH = compile_path(GROUPS)[0]
_SESSION_PATH = re.compile(f"{SESSIONS}/([^/]+)")
_TURN_ROUTES = [(compile_path(path)[0], dialect) for dialect in DIALECTS for path in dialect.paths]
_COUNT_ROUTES = [
    (compile_path(path)[0], dialect) for dialect in DIALECTS if dialect.count for path in dialect.count.paths
]


def find_dialect(path: str) -> Dialect | None:
    """The dialect that answers this path with turns."""
    below = _path_in_api(path)
    return next((dialect for pattern, dialect in _TURN_ROUTES if pattern.match(below)), None)


def dialect_of(scope: Scope) -> Dialect:
    """The dialect whose lists and errors the client understands: the dialect of the path, else of the
    headers, else the first of the API."""
    below = _path_in_api(scope["path"])
    for pattern, dialect in [*_TURN_ROUTES, *_COUNT_ROUTES]:
        if pattern.match(below):
            return dialect
    headers = {name for name, _ in scope["headers"]}
    for dialect in DIALECTS:
        if dialect.header in headers:
            return dialect
    api = tuple(version for version in APIS if below.startswith(version))
    for dialect in DIALECTS:
        if any(path.startswith(api) for path in dialect.paths):
            return dialect
    return DIALECTS[0]


def _path_in_api(path: str) -> str:
    """The path in the agents' API; empty for other paths."""
    match = AGENTS_PATH.fullmatch(path)
    return match["below"] if match else ""
