"""Errors as the libraries of users raise them."""

from __future__ import annotations

from sf_core.dataplane.errors import ApiError, ContextOverflow
from sf_core.dataplane.sessions.session import Session
from tests.bench.dataplane.clients import Client


def overflow_of(client: Client) -> ApiError:
    return ContextOverflow(2050, 2048).reword(*client.dialect.overflow)


def failed_stream(client: Client, error: ApiError) -> bytes:
    """A stream that fails after it began."""
    reply = client.dialect.reply({**client.request, "stream": True}, "s.0.0", Session("s"))
    return reply.start(3) + reply.fail(error, "req_7")
