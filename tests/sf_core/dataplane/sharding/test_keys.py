"""Every process checks keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sf_core.dataplane.control.test_sessions_api import (  # noqa: F401
    test_a_key_and_a_session_fit_into_one_value,
    test_a_run_key_opens_the_agents_routes_of_its_run_only,
    test_a_run_key_sees_the_policy_of_its_run_only,
    with_two_runs,
)
from tests.sf_core.dataplane.sharding.conftest import TWO
from tests.sf_core.dataplane.stand import Server, running_process


@pytest.fixture
def locked(tmp_path: Path, model_dir: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("SF_DATAPLANE_KEY", "plane")
    with (
        running_process(tmp_path / "port", 0, *TWO) as url,
        with_two_runs(url, tmp_path, model_dir) as server,
    ):
        yield server
