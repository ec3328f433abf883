"""Checks that Dask's connections are encrypted. Any peer that reaches a Dask process can run code in it, so
none of ours listens beyond loopback without mutual TLS."""

from __future__ import annotations

from typing import Literal

import dask

from sf_core.config.addresses import is_loopback

Role = Literal["scheduler", "worker", "client"]


def require_tls(host: str, role: Role) -> None:
    """Raises ValueError, one sentence, if others can reach the address and certificates are missing."""
    if not is_loopback(host) and (missing := _missing_settings(role)):
        raise ValueError(
            f"other machines can reach {host}, and Dask executes whatever code it receives: set Dask's "
            f"{missing}, or bind to 127.0.0.1"
        )


def require_certificates(address: str) -> None:
    """Raises ValueError, one sentence, if a client of this scheduler needs certificates and has none."""
    if address.startswith("tls://") and (missing := _missing_settings("client")):
        raise ValueError(f"{address} cannot be reached without certificates: set Dask's {missing}")


def _missing_settings(role: Role) -> str:
    settings = [f"distributed.comm.tls.{key}" for key in ("ca-file", f"{role}.cert")]
    return " and ".join(setting for setting in settings if not dask.config.get(setting))
