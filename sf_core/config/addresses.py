"""Checks on addresses: whether other machines can reach them, and whether they contain a password."""

from __future__ import annotations

import ipaddress

MAX_PORT = 65535


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def without_user(url: str) -> str:
    """Returns the URL unchanged. Raises ValueError if it contains a user or password."""
    if "@" in url:
        # the URL itself is left out, because this sentence goes into logs
        raise ValueError(
            "a user or password does not belong here, where it would be stored with the run and sent to "
            "trackers; put the whole address into the environment variable SF_DATAPLANE_URL"
        )
    return url


def server_url(url: str) -> str:
    """Returns the URL of a vLLM server unchanged. Raises ValueError if it is none, or contains a user or
    password."""
    if "@" in url or not url.startswith(("http://", "https://")):
        raise ValueError("expected http://HOST:PORT without a user or password; a key goes into SF_VLLM_KEY")
    return url
