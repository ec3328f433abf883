from __future__ import annotations

import pytest

from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.gateway.access import Caller, Keys, Lookup
from sf_core.dataplane.runs.run import ServedRun
from tests.bench.dataplane.run_driver import Driver

REQUEST = {"type": "http", "path": "/v1/chat/completions", "headers": []}
STRANGER = Caller.from_scope(REQUEST, Keys("operator's key", welcomes_strangers=True))


def serving(runs: dict[str, ServedRun], model: str) -> str:
    """Id of the run that answers a request for this model without a session."""
    scope = {"caller": STRANGER, "path_params": {}}
    run, _ = Lookup(runs).find_session(scope, model)
    return run.spec.run_id


async def test_a_request_without_a_session_goes_to_the_newest_run_that_is_not_over(driver: Driver) -> None:
    names = ["first", "second", "third"]
    for name in names:
        await driver.register(run_id=name)
    await driver.register(run_id="other", served_model="other")
    runs = driver.plane.runs
    assert serving(runs, "policy") == "third"
    runs["third"].release()
    assert serving(runs, "policy") == "second"
    for name in names[:2]:
        runs[name].release()
    with pytest.raises(ApiError, match=r"Run third has ended: .+; `sf serve RUN` serves its policy"):
        serving(runs, "policy")
    with pytest.raises(ApiError, match="The model 'unknown' does not exist here"):
        serving(runs, "unknown")
