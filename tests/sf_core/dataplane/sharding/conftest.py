"""The fixtures of the data plane, served by a hub and two gateway processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sf_core.dataplane.runs.test_recovery import Restarts, serving
from tests.sf_core.dataplane.stand import Server, attended, running_process

TWO = ("--gateways", "2")


@pytest.fixture
def server(tmp_path: Path, model_dir: str) -> Iterator[Server]:
    with (
        running_process(tmp_path / "port", 0, *TWO, "--grace-s", "0.1") as url,
        attended(url, tmp_path, model_dir) as server,
    ):
        yield server


@pytest.fixture
def plane(tmp_path: Path, model_dir: str) -> Iterator[Restarts]:
    with serving(Restarts(tmp_path, model_dir, TWO)) as plane:
        yield plane
