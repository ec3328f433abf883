"""A data plane with an engine, for every request that it must refuse."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sf_core.dataplane.chat.renderer import Renderer
from tests.sf_core.dataplane.conftest import model_dir, renderer
from tests.sf_core.dataplane.stand import Server, answering, attended, running_app

__all__ = ["model_dir", "renderer"]


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory, model_dir: str, renderer: Renderer) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("plane")
    with running_app(grace_s=0.1) as url, attended(url, folder, model_dir) as server:
        server.register(session_timeout_s=600.0, max_tokens=8)
        server.connect(answering(renderer, "the sum is 42."), tokens_per_step=8)
        yield server
