"""Keys are asked for by every process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sf_core.dataplane.gateways.conftest import TWO
from tests.sf_core.dataplane.stand import Server, running_process
from tests.sf_core.dataplane.test_sessions_api import (  # noqa: F401
    test_a_key_and_a_session_fit_into_one_value,
    test_a_run_key_opens_the_agents_routes_of_its_run_only,
    test_a_run_key_sees_the_policy_of_its_run_only,
    with_two_runs,
)


@pytest.fixture(scope="module")
def locked_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SF_DATAPLANE_KEY", "plane")
        with running_process(tmp_path_factory.mktemp("hub") / "port", 0, *TWO) as url:
            yield url


@pytest.fixture
def locked(locked_hub: str, tmp_path: Path, model_dir: str) -> Iterator[Server]:
    with with_two_runs(locked_hub, tmp_path, model_dir) as server:
        yield server
