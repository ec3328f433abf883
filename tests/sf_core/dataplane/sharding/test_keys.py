"""Every process checks keys, on its own port too."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.sf_core.dataplane.control.test_sessions_api import (  # noqa: F401
    test_a_key_and_a_session_fit_into_one_value,
    test_a_run_key_opens_the_agents_routes_of_its_run_only,
    test_a_run_key_sees_the_policy_of_its_run_only,
    with_two_runs,
)
from tests.sf_core.dataplane.sharding.conftest import TWO
from tests.sf_core.dataplane.stand import Server, running_process


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory, model_dir: str) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("locked")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SF_DATAPLANE_KEY", "plane")
        with (
            running_process(folder / "port", 0, *TWO) as url,
            with_two_runs(url, folder, model_dir) as server,
        ):
            yield server


def test_the_port_of_a_session_wants_a_key_of_its_run(locked: Server) -> None:
    opened = locked.post("/sessions", {"run_id": "red"})
    assert not opened["base_url"].startswith(locked.url)

    def status(**headers: str) -> int:
        return httpx.get(f"{opened['base_url']}/models", headers=headers).status_code

    assert status() == status(Authorization="Bearer blue-run-key") == 401
    assert status(Authorization="Bearer red-run-key") == status(Authorization="Bearer plane") == 200
    assert status(**{"x-goog-api-key": "red-run-key"}) == 200


def test_the_hub_passes_on_what_has_its_key_in_the_query(locked: Server) -> None:
    opened = locked.post("/sessions", {"run_id": "red"})
    url = f"{locked.url}/sessions/{opened['session_id']}/v1beta/models"
    assert httpx.get(url).json()["error"]["status"] == "UNAUTHENTICATED"
    [model] = httpx.get(f"{url}?key=red-run-key").json()["models"]
    assert httpx.get(f"{locked.url}/v1/models?key=red-run-key:{opened['session_id']}").status_code == 200
    assert model["name"].startswith("models/")
