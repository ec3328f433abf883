from __future__ import annotations

from pathlib import Path

import pytest

from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.gateway.keys import Caller, Keys
from sf_core.dataplane.gateway.lookup import Lookup
from sf_core.dataplane.runs.run import ServedRun
from tests.sf_core.dataplane.runs.test_run import make_run

REQUEST = {"type": "http", "path": "/v1/chat/completions", "headers": []}
STRANGER = Caller.of(REQUEST, Keys("operator's key", welcomes_strangers=True))


def serving(runs: dict[str, ServedRun], model: str) -> str:
    """Id of the run that answers a request for this model without a session."""
    scope = {"caller": STRANGER, "path_params": {}}
    run, _ = Lookup(runs).find_session(scope, model)
    return run.spec.run_id


def test_a_request_without_a_session_goes_to_the_newest_run_that_is_not_over(
    tmp_path: Path, renderer: Renderer
) -> None:
    names = ["first", "second", "third"]
    runs = {name: make_run(tmp_path / name, renderer, run_id=name) for name in names}
    runs["other"] = make_run(tmp_path / "other", renderer, run_id="other", served_model="other")
    assert serving(runs, "policy") == "third"
    runs["third"].release()
    assert serving(runs, "policy") == "second"
    for name in names[:2]:
        runs[name].release()
    with pytest.raises(ApiError, match=r"Run third has ended: .+; `sf serve RUN` serves its policy"):
        serving(runs, "policy")
    with pytest.raises(ApiError, match="The model 'unknown' does not exist here"):
        serving(runs, "unknown")
