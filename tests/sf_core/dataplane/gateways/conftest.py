"""The same stand, served by a hub and two gateway processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sf_core.dataplane.stand import Server, attended, running_process
from tests.sf_core.dataplane.test_recovery import Restarts, serving

TWO = ("--gateways", "2")


@pytest.fixture(scope="session")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its URL. Tests that do not end it share it: three processes take seconds to start."""
    with running_process(tmp_path_factory.mktemp("hub") / "port", 0, *TWO, "--grace-s", "0.1") as url:
        yield url


@pytest.fixture
def server(hub: str, tmp_path: Path, model_dir: str) -> Iterator[Server]:
    with attended(hub, tmp_path, model_dir) as server:
        yield server


@pytest.fixture
def plane(tmp_path: Path, model_dir: str) -> Iterator[Restarts]:
    with serving(Restarts(tmp_path, model_dir, TWO)) as plane:
        yield plane
