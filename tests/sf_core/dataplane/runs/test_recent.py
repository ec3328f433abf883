from __future__ import annotations

import asyncio
from pathlib import Path

from sf_core.dataplane.chat.renderer import Renderer
from tests.sf_core.dataplane.runs.test_run import make_run


def test_failures_of_an_earlier_attempt_are_not_held_against_a_later_one(
    tmp_path: Path, renderer: Renderer
) -> None:
    async def scenario() -> None:
        run = make_run(tmp_path, renderer, attempt=1)
        run.outcomes.note_failed("KeyError: x")
        run.begin_attempt(run.spec)
        assert (run.outcomes.failures_in_a_row, run.outcomes.last_error) == (1, "KeyError: x")
        run.begin_attempt(run.spec.model_copy(update={"attempt": 2}))
        assert (run.outcomes.failures_in_a_row, run.outcomes.last_error) == (0, "")

    asyncio.run(scenario())
