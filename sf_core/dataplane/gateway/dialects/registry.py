"""The dialect of each path."""

from __future__ import annotations

from starlette.types import Scope

from sf_core.dataplane.gateway.dialects.anthropic import Anthropic
from sf_core.dataplane.gateway.dialects.chat import Chat
from sf_core.dataplane.gateway.dialects.completions import Completions
from sf_core.dataplane.gateway.dialects.protocol import Dialect
from sf_core.dataplane.gateway.dialects.responses import Responses

CHAT, MESSAGES = Chat(), Anthropic()

DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": Completions(),
    "/v1/responses": Responses(),
    "/v1/messages": MESSAGES,
}
"""Dialects by the end of the paths that answer with turns."""


def dialect_of(scope: Scope) -> Dialect:
    """The dialect whose lists and errors the client understands; OpenAI's for paths that belong to none."""
    is_anthropic = any(name == b"anthropic-version" for name, _ in scope["headers"])
    return MESSAGES if is_anthropic or "/v1/messages" in scope["path"] else CHAT
