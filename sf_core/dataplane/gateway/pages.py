"""Tells requests of web pages from those of programs.

A browser lets any page send requests to loopback, and a host name of the page's own may lead there (DNS
rebinding). Where a request shows a valid key, this does not matter: no page knows one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from urllib.parse import urlsplit

from starlette.types import Scope

from sf_core.config.addresses import is_loopback

OWN_SITES = (b"none", b"same-origin")
"""Values of Sec-Fetch-Site in requests that no other page causes."""


def explain_page(scope: Scope, hosts: Collection[str]) -> str | None:
    """Why the request may be that of a page of another site, in one sentence; None if it cannot be. `hosts`
    are names of this server beside those of loopback."""
    headers = dict(scope["headers"])
    name = _host_of("//" + headers.get(b"host", b"localhost").decode("latin-1"))
    if not (is_loopback(name) or name in hosts):
        return (
            "The data plane answers requests without a valid key only under a loopback name, not under "
            f"{name!r}: send a key, or name the host with --allowed-host."
        )
    if (origin := foreign_origin(headers, hosts)) is not None:
        return (
            f"The request comes from a web page of another origin ({origin}) and shows no valid key: send a "
            "key, or name the host of the page with --allowed-host."
        )
    media_type = headers.get(b"content-type", b"application/json").partition(b";")[0].strip().lower()
    if media_type != b"application/json" and not media_type.endswith(b"+json"):
        return (
            "A request without a valid key must have the content type application/json, not "
            f"{media_type.decode('latin-1')!r}: add the header `content-type: application/json`."
        )
    return None


def foreign_origin(headers: Mapping[bytes, bytes], hosts: Collection[str]) -> str | None:
    """The origin of the page that causes a request, if it is not one of this server; None for programs."""
    origin = headers.get(b"origin", b"").decode("latin-1")
    if origin and _host_of(origin) in hosts:
        return None
    if origin and origin.partition("://")[2] != headers.get(b"host", b"").decode("latin-1"):
        return origin
    return None if headers.get(b"sec-fetch-site", b"none") in OWN_SITES else "not named"


def _host_of(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").removesuffix(".")
    except ValueError:
        return ""
