"""Whether the proxies that the environment names can be used by the HTTP clients of Prefect and of agents."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

STARTING = {"train", "resume", "evaluate", "try", "serve", "up", "server", "worker", "setup-server"}
"""Commands that start processes with such clients."""

_NAMES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


def check_proxies() -> None:
    """Raises ValueError, one sentence, if a client cannot be made with one of these variables, in capitals or
    not."""
    given = {name: value for name, value in os.environ.items() if name.lower() in _NAMES and value.strip()}
    for name, value in given.items():
        is_list = name.lower() == "no_proxy"
        for part in value.split(",") if is_list else [value]:
            with _alone(given, name, part):
                fault = _fault()
            # a proxy may be named with a password
            shown = re.sub("//.*@", "//", part.strip())
            if fault == "socks":
                raise ValueError(
                    f"{name} names a SOCKS proxy ({shown}), for which this Python lacks the package "
                    f"socksio: pip install 'httpx[socks]', or unset {name} for this command"
                )
            if fault and is_list:
                raise ValueError(
                    f"{name} contains {shown!r}, which Prefect's HTTP client cannot read ({fault}): write "
                    "IPv6 addresses without brackets, and hosts instead of a range of IPv6 addresses"
                )
            if fault:
                raise ValueError(
                    f"{name} is {shown!r}, which is not the address of a proxy ({fault}): set {name} to a "
                    f"URL such as http://proxy.example:3128, or unset {name} for this command"
                )


def _fault() -> str:
    """Why no client can be made in this environment: `socks` if a package is missing; empty if one can."""
    import httpx

    try:
        # without certificates, which take long to read
        httpx.Client(verify=False).close()
    except ImportError:
        return "socks"
    except (ValueError, httpx.InvalidURL) as error:
        return re.sub("//.*@", "//", str(error))
    return ""


@contextmanager
def _alone(given: dict[str, str], name: str, value: str) -> Iterator[None]:
    """The environment without these variables, but for one."""
    for other in given:
        del os.environ[other]
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        os.environ.update(given)
