"""Who can reach an address."""

from __future__ import annotations

import ipaddress

MAX_PORT = 65535


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
