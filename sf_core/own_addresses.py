"""The addresses at which browsers may use a server of ours: those of loopback, and those that its operator
names. Browsers tell the host, the origin and the site of a request truthfully; other programs send neither
origin nor site. A host name of a stranger's may have been rebound to this machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from sf_core.config.addresses import is_loopback

OWN_SITES = ("none", "same-origin")
"""Values of Sec-Fetch-Site in requests that no page of another site causes."""

UNNAMED = "not named"
"""Stands for the origin of a page that is known to be of another site only."""


class OwnAddresses:
    def __init__(self, named: Iterable[str] = ()) -> None:
        """`named` are HOST, HOST:PORT or URLs, as in the address bar of a browser."""
        self._addresses = {address_of(url) for url in named} - {"", "*"}
        self._hosts = {host_of(address) for address in self._addresses} - {""}

    def find_foreign_host(self, headers: Mapping[str, str], *own: str) -> str | None:
        """The host that a request asks for, if it is none of ours; `own` are further hosts that are."""
        host = host_of(headers.get("host", "localhost"))
        return None if is_loopback(host) or host in self._hosts or host in own else host

    def find_foreign_origin(self, headers: Mapping[str, str]) -> str | None:
        """The origin of the page that causes a request, unless the page is one of ours; None for programs."""
        if origin := headers.get("origin"):
            address = address_of(origin)
            asked = headers.get("host", "").lower()
            if address in self._addresses:
                return None
            if address != asked:
                return origin
        return None if headers.get("sec-fetch-site", "none") in OWN_SITES else UNNAMED


def address_of(url: str) -> str:
    """HOST or HOST:PORT of a URL."""
    try:
        return urlsplit(url if "//" in url else f"//{url}").netloc.lower()
    except ValueError:
        return ""


def host_of(address: str) -> str:
    try:
        return (urlsplit(f"//{address}").hostname or "").removesuffix(".")
    except ValueError:
        return ""
