"""Addresses and paths in settings: whether other machines can reach an address, whether it contains a
password, and what `~` and `${VAR}` stand for in a path. Also the addresses at which browsers may use a
server of ours.

These are the addresses of loopback and those that the operator names. Browsers tell the host, the origin and
the site of a request truthfully; other programs send neither origin nor site. The host name of a stranger may
have been rebound to this machine.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
from collections.abc import Iterable, Mapping
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator

MAX_PORT = 65535

LOOPBACK = "127.0.0.1"

_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|([A-Za-z_]\w*))")
_IS_PATH = re.compile(r"(~|\$\{\w+\})(/|$)")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen_at(host: str, port: int, option: str = "--port") -> socket.socket:
    """A socket that accepts connections there. Raises OSError, one sentence with the remedy, if that is not
    possible; `option` sets the port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), backlog=2048, family=family)
    except OSError as error:
        remedies = {
            errno.EADDRINUSE: f"is in use; end the process that listens there, or choose another {option}",
            errno.EACCES: f"is for administrators only; choose a {option} of 1024 or more",
            errno.EADDRNOTAVAIL: "is no address of this machine; choose another --host",
            socket.EAI_NONAME: "cannot be used, because no host has this name; choose another --host",
        }
        reason = remedies.get(error.errno or 0, f"cannot be used: {error}")
        raise OSError(f"port {port} of {host} {reason}") from None


def check_free(host: str, port: int, option: str = "--port") -> None:
    """Raises OSError, as `listen_at` does, if a server cannot listen there."""
    listen_at(host, port, option).close()


def refuse_user(url: str) -> str:
    """Returns the URL unchanged. Raises ValueError if it contains a user or password."""
    if "@" in url:
        # the URL itself is left out, because this sentence goes into logs
        raise ValueError(
            "do not give a user or password here, because this setting is stored with the run and sent to "
            "trackers; put the whole address into the environment variable SF_DATAPLANE_URL"
        )
    return url


def check_server_url(url: str) -> str:
    """Returns the URL of a server unchanged. Raises ValueError if it is none, or contains a user or
    password."""
    if "@" in url or not url.startswith(("http://", "https://")):
        raise ValueError(
            "expected http://HOST:PORT without a user or password; set a key as an environment variable"
        )
    return url


def without_password(url: str) -> str:
    """The URL without user and password.

    >>> without_password("https://me:secret@host:4200/api")
    'https://host:4200/api'
    """
    return re.sub(r"(?<=://)[^/?#]*@", "", url)


def expand(path: str) -> str:
    """The path with `~`, `$VAR` and `${VAR}` replaced. Raises ValueError if a variable is not set.

    >>> expand("/data/runs")
    '/data/runs'
    """
    for found in _VARIABLE.finditer(path):
        if (name := found[1] or found[2]) not in os.environ:
            raise ValueError(f"the environment variable {name} is not set")
    return os.path.expanduser(os.path.expandvars(path))


FilePath = Annotated[str, AfterValidator(expand)]
"""Path of a file or folder, or a URL."""


def expand_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of an environment, whose types are not known here: text that begins with `~/` or `${VAR}/` is
    a path. Raises ValueError as `expand` does, with the setting's name."""
    found = dict(settings)
    for name, value in settings.items():
        if isinstance(value, str) and _IS_PATH.match(value):
            try:
                found[name] = expand(value)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
    return found


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
