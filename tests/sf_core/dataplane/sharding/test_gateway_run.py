"""The sessions of one run in a gateway process, tested without the process."""

from __future__ import annotations

from pathlib import Path

import pytest

from sf_core.dataplane.bodies import FinishBody, RunSpec
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.journal.events import reader
from sf_core.dataplane.journal.journal import Journal
from sf_core.dataplane.sessions.finished import FinishedSession
from sf_core.dataplane.sessions.memory import Memory
from sf_core.dataplane.sessions.session import Session
from sf_core.dataplane.sharding.gateway_run import RunShard
from sf_core.dataplane.sharding.peer import Peer
from sf_core.dataplane.sharding.relay import Uplink, UplinkRouter
from tests.sf_core.dataplane.cluster import in_loop
from tests.sf_core.dataplane.sessions.test_session import sample, user
from tests.sf_core.dataplane.specs import SPEC
from tests.sf_core.dataplane.stand import say


@in_loop
async def test_a_session_that_is_closed_again_leaves_the_same_behind(
    tmp_path: Path, model_dir: str, renderer: Renderer
) -> None:
    spec = RunSpec(**SPEC, run_dir=str(tmp_path), model_dir=model_dir)
    hub = Peer(lambda: None)
    journal, router = Journal(tmp_path / "0.journal"), UplinkRouter("run", Uplink(hub))
    run = RunShard(spec, renderer, journal, router, 1.0, Memory(), hub)
    run.open(session := Session("run.open.1"))
    sample(session, renderer, [user("hi")], say(renderer, "yes"))
    report = FinishBody(status="finished", reward=1.0)
    left = run.close("run.open.1", report)
    assert [row.reward for row in reader(FinishedSession)(left).trajectories] == [1.0]
    assert run.close("run.open.1", report) == left
    run.forget_closed("run.open.1")
    with pytest.raises(ApiError, match="unknown or over"):
        run.close("run.open.1", report)
    await journal.close()
