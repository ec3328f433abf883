"""Which dialect is spoken where."""

from __future__ import annotations

from starlette.types import Scope

from sf_core.dataplane.dialects.chat import Chat
from sf_core.dataplane.dialects.protocol import Dialect

DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": Chat(),
}
"""By the end of the path that answers with turns."""


def dialect_of(scope: Scope) -> Dialect:
    """Whose lists and errors the sender understands; OpenAI's for paths that belong to none."""
    return DIALECTS["/v1/chat/completions"]
