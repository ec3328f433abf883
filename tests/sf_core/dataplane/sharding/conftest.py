"""The fixtures of the data plane, served by a hub and two gateway processes.

Tests that kill none of them share one. It lets runs go as soon as they are over, so that each test begins its
run afresh.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from sf_core.cli.stack.local import free_port
from tests.sf_core.dataplane.runs.test_recovery import Restarts, serving
from tests.sf_core.dataplane.stand import Server, attended, running_process

TWO = ("--gateways", "2")


@contextlib.contextmanager
def shared_process(folder: Path, *options: str) -> Iterator[str]:
    with running_process(folder / "port", 0, *TWO, *options, module="tests.sf_core.dataplane.hasty") as url:
        yield url


@contextlib.contextmanager
def fresh(url: str, folder: Path, model_dir: str) -> Iterator[Server]:
    """Server of a shared data plane; at the end its run is forgotten there."""
    with attended(url, folder, model_dir) as server:
        yield server
    wait_until_let_go(url)


def wait_until_let_go(url: str) -> None:
    Server.wait_for(lambda: httpx.get(f"{url}/runs/run").status_code == 404)


@pytest.fixture(scope="session")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Data plane that soon gives up turns whose client went away."""
    with shared_process(tmp_path_factory.mktemp("hasty"), "--grace-s", "0.1") as url:
        yield url


@pytest.fixture(scope="session")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Data plane that goes on with turns whose client went away."""
    with shared_process(tmp_path_factory.mktemp("patient"), "--grace-s", "30") as url:
        yield url


@pytest.fixture
def server(hasty: str, tmp_path: Path, model_dir: str) -> Iterator[Server]:
    with fresh(hasty, tmp_path, model_dir) as server:
        yield server


@pytest.fixture
def plane(tmp_path: Path, model_dir: str) -> Iterator[Restarts]:
    with serving(Restarts(tmp_path, model_dir, TWO, free_port(3))) as plane:
        yield plane
