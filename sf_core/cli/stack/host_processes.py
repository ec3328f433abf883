"""Turns the process of a command into a server of a cluster on several machines: Prefect's or Dask's.

The functions never return. A server that other machines can reach needs a password or TLS to start.
"""

from __future__ import annotations

import os
from typing import NoReturn

from sf_core.cli.stack import processes
from sf_core.cli.stack.processes import Part
from sf_core.config.addresses import check_free, is_loopback
from sf_core.process.environment_variables import prefect_password
from sf_core.process.import_path import module_environment
from sf_core.scheduling.tls import require_tls
from sf_core.scheduling.worker import DASK_SETTINGS


def become_prefect_server(host: str, port: int) -> NoReturn:
    """Turn this process into a Prefect server for deployments. Raises ValueError for an address that others
    can reach without a password, OSError for a port that is in use."""
    if not is_loopback(host) and prefect_password() is None:
        raise ValueError(
            f"other machines can reach {host}: set PREFECT_SERVER_API_AUTH_STRING to USER:PASSWORD, or "
            "serve on 127.0.0.1"
        )
    check_free(host, port)
    _become(processes.prefect_server(port, host=host, for_deployments=True))


def become_scheduler(host: str, port: int) -> NoReturn:
    """Turn this process into a Dask scheduler. Raises ValueError for an address that others can reach if
    Dask's settings name no certificates, OSError for a port that is in use."""
    require_tls(host, "scheduler")
    check_free(host, port)
    _become(processes.dask_scheduler(port, host=host))


def _become(part: Part) -> NoReturn:
    environment = {**DASK_SETTINGS, **processes.PREFECT_SETTINGS, **part.env, **module_environment()}
    os.execvpe(part.command[0], part.command, environment)
