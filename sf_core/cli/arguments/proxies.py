"""Whether the proxies that the environment names can be used by the HTTP clients of Prefect and of agents."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

STARTING = {
    *("train", "resume", "sweep", "evaluate", "try", "serve"),
    *("up", "server", "worker", "setup-server"),
}
"""Commands that start processes with such clients."""

_NAMES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


def check_proxies() -> None:
    """Raises ValueError, one sentence, if no client can be made with these variables, in capitals or not."""
    proxies = {name: value for name, value in os.environ.items() if name.lower() in _NAMES and value.strip()}
    lists = ",".join(value for name, value in proxies.items() if name.lower() == "no_proxy")
    # started processes find all exceptions in both variables (`reach_directly`)
    if not _fault(proxies, proxies | {"NO_PROXY": lists, "no_proxy": lists}):
        return
    for name, value in proxies.items():
        is_list = name.lower() == "no_proxy"
        for part in value.split(",") if is_list else [value]:
            fault = _fault(proxies, {name: part})
            # a proxy may be named with a password
            address = re.sub(r"^(\w+://)?.*@", r"\1", part.strip())
            if fault == "socks":
                raise ValueError(
                    f"{name} names a SOCKS proxy ({address}), for which this Python lacks the package "
                    f"socksio: pip install 'httpx[socks]', or unset {name} for this command"
                )
            why = f" ({fault})" if fault and "@" not in part else ""
            if fault and is_list:
                raise ValueError(
                    f"{name} contains {address!r}, which Prefect's HTTP client cannot read{why}: write "
                    "IPv6 addresses without brackets, and hosts instead of a range of IPv6 addresses"
                )
            if fault:
                raise ValueError(
                    f"{name} is {address!r}, which is not the address of a proxy{why}: set {name} to a "
                    f"URL such as http://proxy.example:3128, or unset {name} for this command"
                )


def _fault(proxies: Mapping[str, str], tried: Mapping[str, str]) -> str:
    """Why no client can be made with the variables `kept` instead of `given`: `socks` if a package is
    missing; empty if one can."""
    import httpx

    try:
        with _replaced(proxies, tried):
            # without certificates, which take long to read
            httpx.Client(verify=False).close()
    except ImportError:
        return "socks"
    except (ValueError, httpx.InvalidURL) as error:
        return str(error)
    return ""


@contextmanager
def _replaced(proxies: Mapping[str, str], tried: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    for name in proxies:
        del os.environ[name]
    os.environ.update(tried)
    try:
        yield
    finally:
        for name in tried:
            del os.environ[name]
        os.environ.update({name: before[name] for name in (*proxies, *tried) if name in before})
