"""The same stand, served by a hub and two gateway processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.sf_core.dataplane.stand import Server, running_process
from tests.sf_core.dataplane.test_recovery import Restarts, serving


@pytest.fixture
def server(tmp_path: Path, model_dir: str) -> Iterator[Server]:
    options = ("--gateways", "2", "--grace-s", "0.1")
    with (
        running_process(tmp_path / "port", 0, *options) as url,
        httpx.Client(base_url=url, timeout=30) as http,
    ):
        server = Server(url, http, tmp_path, model_dir)
        yield server
        if http.get("/runs/run").status_code == 200:
            http.post("/runs/run/resume")
            http.post("/runs/run/release")
        for thread in server.threads:
            thread.join(10)


@pytest.fixture
def plane(tmp_path: Path, model_dir: str) -> Iterator[Restarts]:
    with serving(Restarts(tmp_path, model_dir, ("--gateways", "2"))) as plane:
        yield plane
