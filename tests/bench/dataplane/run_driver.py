"""Flow, runners and agents of one run, in the test's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from sf_core.dataplane.chat.renderer import Renderer
from tests.bench.dataplane.verbs.flow import Flow
from tests.bench.dataplane.verbs.judges import Judges
from tests.bench.dataplane.verbs.visitors import Visitors

OPERATIONS = [
    *("claim", "finish", "fail", "lose", "play", "play", "seal", "seal", "publish", "evaluate"),
    *("pause", "pause_engine", "resume", "resume_engine", "go_on_while_it_is_compacted_twice"),
]


class Driver(Flow, Judges, Visitors):
    """All verbs of all who work on a run. Those without a parameter do nothing if nothing is to be done."""

    async def go_on_while_it_is_compacted_twice(self) -> None:
        """The second compaction waits for the first one."""
        meanwhile = [self.finish, self.claim, self.publish, self.pause, self.revoke]
        compactions = [self.run.compact() for _ in range(2)]
        await asyncio.gather(*compactions, *(operation() for operation in meanwhile))


@contextlib.asynccontextmanager
async def driving(model_dir: str, renderer: Renderer, folder: Path | None = None) -> AsyncIterator[Driver]:
    """A driver. In the end a restart has to find the run as it is, and no answer may be lost."""
    with contextlib.ExitStack() as held:
        if folder is None:
            folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        driver = Driver(folder, model_dir, renderer)
        try:
            yield driver
            await driver.check_restart()
            await driver.check_answers()
        finally:
            await driver.plane.close()
