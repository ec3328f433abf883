"""Flow and agent runner of one run, in the test's own event loop."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from pathlib import Path
from typing import Any

from sf_core.dataplane.bodies import ClaimBody, FinishBody, RunSpec
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.control.plane import DataPlane
from sf_core.dataplane.journal.journal import Journal
from sf_core.dataplane.options import DataplaneOptions
from sf_core.dataplane.routing.connection import EngineConnection
from sf_core.dataplane.runs import claiming, decide, endings
from sf_core.dataplane.runs.events import read_event
from sf_core.dataplane.runs.groups import Group
from sf_core.dataplane.runs.recovery import reopen_run
from sf_core.dataplane.runs.run import ServedRun
from sf_core.dataplane.sessions.memory import Memory
from sf_core.dataplane.sessions.session import Session
from sf_core.types import WeightsRef
from tests.bench.dataplane.conversations import sample, user
from tests.bench.dataplane.planes import say
from tests.bench.dataplane.specs import SPEC, changed

OPERATIONS = [
    *("claim", "finish", "fail", "lose", "play", "play", "seal", "seal", "publish", "evaluate"),
    *("pause", "pause_engine", "resume", "resume_engine", "go_on_while_it_is_compacted_twice"),
]


class Driver:
    """Flow and agent runner of one run, without HTTP."""

    def __init__(self, folder: Path, model_dir: str, renderer: Renderer) -> None:
        self.spec = changed(SPEC, run_dir=str(folder / "run"), model_dir=model_dir, gate="varied")
        self.folder = folder
        self.renderer = renderer
        self.plane = DataPlane(DataplaneOptions(str(folder / "plane")))
        self.numbers = itertools.count()

    async def register(self, **changes: Any) -> None:
        self.spec = changed(self.spec, **changes)
        await self.plane.register(RunSpec.model_validate(self.spec))

    @property
    def runner(self) -> str:
        return f"a{self.spec['attempt']}"

    @property
    def run(self) -> ServedRun:
        return self.plane.runs["run"]

    @property
    def given_out(self) -> list[Session]:
        return [session for session in self.run.sessions.values() if session.claim is not None]

    async def restart(self) -> None:
        await self.plane.close()
        self.plane = DataPlane(DataplaneOptions(str(self.folder / "plane")))
        await self.plane.reopen()

    async def claim(self) -> None:
        await claiming.claim(self.run, ClaimBody(runner=self.runner, max=3, running=list(self.run.sessions)))

    async def lose(self) -> None:
        await claiming.claim(
            self.run, ClaimBody(runner=self.runner, max=0, running=list(self.run.sessions)[1:])
        )

    async def finish(self) -> None:
        for session in self.given_out[:1]:
            sample(session, self.renderer, [user("hi")], say(self.renderer, "x"), version=self.version)
            reward = float(next(self.numbers) % 5 < 2)
            await endings.finish(self.run, session, FinishBody(status="finished", reward=reward))

    async def play(self) -> None:
        await self.claim()
        for _ in list(self.run.sessions):
            await self.finish()

    async def fail(self) -> None:
        for session in self.given_out[-1:]:
            await endings.finish(self.run, session, FinishBody(status="failed"))

    async def seal(self) -> None:
        if decide.readiness(self.run.state.ledger, self.run.state.ledger.next_batch).ready:
            await self.plane.sealers["run"].seal_batch(self.run.state.ledger.next_batch, self.spec["attempt"])

    async def publish(self) -> None:
        if self.version < self.run.state.ledger.next_batch:
            await self.plane.publish(self.run, WeightsRef(self.version + 1, "w"))

    async def evaluate(self) -> None:
        await self.run.start_evaluation(self.version, 2)

    async def pause(self) -> None:
        await self.run.pause("freeze", None)

    async def resume(self) -> None:
        await self.run.resume(None)

    async def pause_engine(self) -> None:
        engine = EngineConnection("engine", "lease", "worker", 1, 8, lambda frame: None)
        self.run.router.add(engine)
        await self.run.pause("evacuate", "engine")
        self.run.router.lose(engine)

    async def resume_engine(self) -> None:
        await self.run.resume("engine")

    async def go_on_while_it_is_compacted_twice(self) -> None:
        """The second compaction waits for the first one."""
        meanwhile = [self.finish, self.claim, self.publish, self.pause, self.revoke]
        compactions = [self.run.compact() for _ in range(2)]
        await asyncio.gather(*compactions, *(operation() for operation in meanwhile))

    async def revoke(self) -> None:
        await self.plane.revoke(self.run, f"lease {next(self.numbers)}")

    async def begin_attempt(self) -> None:
        await self.register(attempt=self.spec["attempt"] + 1, iteration=self.run.state.ledger.next_batch)

    async def go_on_after_release(self) -> None:
        await self.plane.release(self.run)
        await self.begin_attempt()

    async def begin_anew(self) -> None:
        at = self.spec["attempt"] + 1
        progress = {"iteration": 0, "version": 0, "done_groups": []}
        await self.register(attempt=at, origin=f"made by {at}", **progress)

    @property
    def version(self) -> int:
        return self.run.router.weights.version

    def state(self) -> dict[str, Any]:
        return surviving(self.run)

    async def check_restart(self) -> None:
        """A restart finds what there was, with the journal as it is and with a compacted one."""
        before = self.state()
        await self.check_snapshot()
        await self.restart()
        assert self.state() == before

    async def check_snapshot(self) -> None:
        """A restart after a compaction finds the same: replay(snapshot(state)) == state."""
        run = self.run
        await run.journal.flush()
        written = [event async for event in run.journal.replay(read_event)]
        head, keep = run.state.snapshot()
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            journal = Journal(Path(folder) / "run.journal")
            for event in (*head, *filter(keep, written)):
                journal.note(event)
            await journal.flush()
            again = await reopen_run(journal, 10.0, Memory())
            assert again is not None
            await journal.close()
        assert surviving(again) == surviving(run)


def surviving(run: ServedRun) -> dict[str, Any]:
    """All that a restart has to find of a run."""
    state = run.state
    ledger = run.state.ledger
    last = ledger.next_batch - 1
    newest = max(ledger.evaluations, default=0)
    ended = [*ledger.ended_by.get(last, ()), *ledger.ended]
    results = {place: result.reward for place, result in state.results.by_place.items()}
    return {
        "weights": (state.weights, run.router.weights, ledger.version),
        "groups": {index: members(group) for index, group in ledger.groups.items()},
        "evaluation": [(v, members(group)) for v, group in ledger.evaluations.items() if v == newest],
        "rejected": ledger.rejected,
        "done": ledger.list_done_before(ledger.next_batch),
        # the journal of an attempt that chooses nothing does not tell the versions of groups
        "ended": [one._replace(version=0) for one in ended if one.results and one.pick],
        "next_batch": ledger.next_batch,
        "last_batch": (ledger.batches.get(last), state.answers.get(last)),
        "sessions": {name: facts(session) for name, session in sorted(run.sessions.items())},
        "results": {at: results[at] for at in results if at.split == "train" or at.group == newest},
        "opened": {name: result.reward for name, result in state.results.opened.items()},
        "released": state.released,
        "paused": (state.paused, run.router.paused),
        "revoked": state.revoked_leases,
    }


def facts(session: Session) -> tuple[Any, ...]:
    given = session.claim, session.group, session.task_id, session.environment, session.metadata
    return *given, session.answer, session.output, session.earned, session.waits_for_group


def members(group: Group) -> list[Any]:
    return [(m.progress, m.attempt, m.num_failures, m.result, m.min_version) for m in group.members]
