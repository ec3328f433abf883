"""Who can reach an address, and who may read it."""

from __future__ import annotations

import ipaddress

MAX_PORT = 65535


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def without_user(url: str) -> str:
    """The URL as it is. Raises ValueError if it names a user or password."""
    if "@" in url:
        # not shown: this sentence goes into logs
        raise ValueError(
            "a user or password does not belong here, where it would be stored with the run and sent to "
            "trackers; put the whole address into the environment variable SF_DATAPLANE_URL"
        )
    return url
