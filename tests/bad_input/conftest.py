"""A data plane with an engine, for every request that it must refuse."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sf_core.dataplane.chat.renderer import Renderer
from tests.bench.dataplane.planes import ServedPlane, answering, attended, running_app


@pytest.fixture(scope="session")
def refusing_plane(
    tmp_path_factory: pytest.TempPathFactory, model_dir: str, renderer: Renderer
) -> Iterator[ServedPlane]:
    folder = tmp_path_factory.mktemp("plane")
    with running_app(grace_s=0.1) as url, attended(url, folder, model_dir) as plane:
        plane.register(session_timeout_s=600.0, max_tokens=8)
        plane.connect(answering(renderer, "the sum is 42."), tokens_per_step=8)
        yield plane


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, model_dir: str, renderer: Renderer
) -> Iterator[tuple[ServedPlane, str]]:
    """A data plane and a session of its run `run`, which has an engine; flows command the run `other`."""
    with (
        running_app(grace_s=0.1) as url,
        attended(url, tmp_path_factory.mktemp("api"), model_dir) as plane,
    ):
        plane.register(session_timeout_s=600.0, max_tokens=8)
        plane.connect(answering(renderer, "the sum is 42."), tokens_per_step=8)
        plane.register(run_id="other", run_dir=str(plane.run_dir / "other"), served_model="other")
        yield plane, plane.post("/sessions", {"run_id": "run"})["session_id"]
