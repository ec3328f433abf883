from __future__ import annotations

import asyncio
from pathlib import Path

from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.runs.recovery import begin_attempt
from sf_core.dataplane.sessions.claims import Claim, SessionSlot
from tests.sf_core.dataplane.runs.test_run import make_run


def test_failures_of_an_earlier_attempt_are_not_held_against_a_later_one(
    tmp_path: Path, renderer: Renderer
) -> None:
    async def scenario() -> None:
        run = make_run(tmp_path, renderer, attempt=1)
        run.state.recent.note_failed("KeyError: x", Claim(SessionSlot("train", 0, 0), 0))
        await begin_attempt(run, run.spec)
        assert (run.state.recent.failures_in_a_row, run.state.recent.last_error) == (1, "KeyError: x")
        await begin_attempt(run, run.spec.model_copy(update={"attempt": 2}))
        assert (run.state.recent.failures_in_a_row, run.state.recent.last_error) == (0, "")

    asyncio.run(scenario())
